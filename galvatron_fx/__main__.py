"""``python -m galvatron_fx``: the command line, as ``galvatron-fx``."""

import sys

from galvatron_fx.cli.main import main

sys.exit(main())
