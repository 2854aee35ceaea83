"""Every private torch entry point that Galvatron-FX uses, so that a torch upgrade touches one folder."""

from galvatron_fx.ir.torch_compat.decompositions import repair_multilabel_margin_loss, repair_recurrent_dropout
from galvatron_fx.ir.torch_compat.fake_kernels import widen_grouped_products
from galvatron_fx.ir.torch_compat.versions import warn_of_an_untested_version

warn_of_an_untested_version()
widen_grouped_products()
repair_multilabel_margin_loss()
repair_recurrent_dropout()
