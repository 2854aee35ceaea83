"""What a role allows on its axis: which shards, where parameters lie, how values cross block boundaries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import REPLICATE, Placement, Runs, Shard, fits
from galvatron_fx.ir.graph.symbols import BATCH, SEQUENCE
from galvatron_fx.ir.kernels.experts import place_by_rank, route
from galvatron_fx.ir.plan.strategy import BATCH_ROLES, CONTEXT, EXPERT_ROLES, EXPERT_SEQUENCE, GRAPH, PIPELINE
from passes.sharding.rules import OpRule, counts_tokens

_WHOLE_WEIGHTS = ("sequence", CONTEXT, GRAPH)
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_SEQUENCE_ROLES = ("sequence", CONTEXT, "tensor_sequence", EXPERT_SEQUENCE)


@dataclass(frozen=True)
class RoleRules:
    """The limits that ``role`` puts on an axis of ``degree`` ranks; ``batch`` is the batch size left on each rank.

    An axis that holds stages is lowered where other blocks are spread over its ranks: to a block of one rank all is
    whole, as if each rank computed it. ``runs``: in which runs features may be split one by one.
    """

    role: str
    degree: int
    batch: int
    runs: tuple[Runs, ...] = ()

    def splits_batch(self, spec: TensorSpec, placement: Shard) -> bool:
        """Whether the shard cuts the batch, and not what lies outside or inside of it in the same dim."""
        size = spec.symbolic[placement.dim]
        holds = BATCH in getattr(size, "free_symbols", ())
        runs = spec.batch_split_factor(placement.dim)
        return holds and runs <= placement.num_runs < runs * max(self.batch, 1)

    def allows(self, spec: TensorSpec, placement: Placement, listed: bool = False) -> bool:
        """Whether a value inside a block may be placed so; ``listed`` as of :meth:`parameter_choices`."""
        if self.role == PIPELINE:
            return placement == REPLICATE
        if not isinstance(placement, Shard):
            return True
        if self.role in EXPERT_ROLES and self._is_of_experts(spec):
            return placement in self.parameter_choices(spec, listed)
        symbols = getattr(spec.symbolic[placement.dim], "free_symbols", ())
        if placement.is_strided and not symbols and placement.split_factor not in self.runs:
            return False
        if isinstance(placement.split_factor, tuple) and symbols:
            return False
        if self.role == GRAPH:
            return not placement.mirrored and (BATCH not in symbols or self.splits_batch(spec, placement))
        if placement.mirrored != (self.role == CONTEXT) or (placement.mirrored and SEQUENCE not in symbols):
            return False
        if self.role == "tensor" and SEQUENCE in symbols and not self._splits_features(spec, placement):
            return False
        return self.splits_batch(spec, placement) == (self.role in BATCH_ROLES)

    def _is_of_experts(self, spec: TensorSpec) -> bool:
        """Whether a value may be one of the experts' weights: no part of what the role splits along its tokens."""
        return spec.dim_of(BATCH) is None and (self.role not in _SEQUENCE_ROLES or spec.dim_of(SEQUENCE) is None)

    def _splits_features(self, spec: TensorSpec, placement: Shard) -> bool:
        """Whether the shard lies behind the batch and the sequence of a flattened dim (heads, say)."""
        size = spec.symbolic[placement.dim]
        rest = spec.shape[placement.dim] // placement.num_runs
        factor = int(size.as_coeff_Mul()[0]) if hasattr(size, "as_coeff_Mul") else 1
        return rest <= factor

    @property
    def ways_to_split(self) -> list[Placement]:
        """Shards, of any dim, that operators may make of nothing: no input comes in as the role splits values."""
        if self.role != CONTEXT:
            return []
        return [Shard(0, runs, mirrored=True) for runs in dict.fromkeys((1, max(self.batch, 1)))]

    def avoids(self, target: object, rule: OpRule) -> bool:
        """Whether a rule leaves undone what the role is there to do, as no others do it: experts that stay whole, keys
        and values that are gathered.
        """
        if self.role == CONTEXT and target in _ATTENTION:
            return not rule.expansion
        return self.role in EXPERT_ROLES and target in (route, place_by_rank) and not rule.exchanges

    def allows_exchange(self, rule: OpRule, call: OpCall) -> bool:
        """Whether ranks may exchange rows so: those of tokens that the role splits, for experts that it splits."""
        return self.role in EXPERT_ROLES and all(
            self.splits_batch(spec, placement) == (self.role in BATCH_ROLES)
            for placement, spec in rule.placed(call)
            if isinstance(placement, Shard) and spec is not None and counts_tokens(spec, placement)
        )

    def mixes_weights(self, rule: OpRule, call: OpCall) -> bool:
        """Whether an operator would split features by weights that lie as experts do, as role ``tensor`` splits them;
        under ``expert_sequence`` the weights of all but experts are whole.
        """
        if self.role != EXPERT_SEQUENCE:
            return False
        of_experts = {
            self._is_of_experts(spec) for placement, spec in rule.placed(call) if isinstance(placement, Shard) and spec
        }
        return len(of_experts) > 1

    def must_split(self, spec: TensorSpec) -> bool:
        """Whether a value holds what the axis is there to split: the batch, or the sequence."""
        if self.role in BATCH_ROLES:
            return spec.dim_of(BATCH) is not None
        if self.role == GRAPH:
            return self._has_features(spec)
        activation = spec.dim_of(BATCH) is not None and spec.dim_of(SEQUENCE) is not None
        return activation and self.role in _SEQUENCE_ROLES

    def _has_features(self, spec: TensorSpec) -> bool:
        """Whether a value has a row of numbers for each vertex, or edge: degrees and places are cheap to have whole."""
        of_rows = spec.dim_of(BATCH) is not None or spec.dim_of(SEQUENCE) is not None
        return of_rows and len(spec.shape) > 1 and spec.dtype.is_floating_point

    def may_change(self, spec: TensorSpec, have: Placement, want: Placement) -> bool:
        """Whether a redistribution suits the role.

        Tensor roles split the features of activations only where a split parameter does: cutting whole activations
        along features merely to share elementwise work multiplies the messages. Batch roles gather no activations.
        """
        if self.role in BATCH_ROLES:
            return not (isinstance(have, Shard) and want == REPLICATE)
        whole_weights = self.role in (*_WHOLE_WEIGHTS, EXPERT_SEQUENCE)
        if whole_weights or isinstance(have, Shard) or not isinstance(want, Shard):
            return True
        size = spec.symbolic[want.dim]
        activation = spec.dim_of(BATCH) is not None or spec.dim_of(SEQUENCE) is not None
        return not activation or (SEQUENCE in getattr(size, "free_symbols", ()) and self.role == "tensor_sequence")

    def parameter_choices(self, spec: TensorSpec, listed: bool = False) -> list[Placement]:
        """Where a parameter of the block may lie, given its local shape, while its block runs. ``listed``: it is what
        one of listed experts has, of which ranks hold parts (:func:`galvatron_fx.ir.kernels.experts.gather_experts`).
        """
        dims = {
            "tensor": len(spec.shape),
            "tensor_sequence": len(spec.shape),
            **dict.fromkeys(EXPERT_ROLES, int(len(spec.shape) > 1 or listed)),
        }
        shards: list[Placement] = [
            Shard(dim) for dim in range(dims.get(self.role, 0)) if fits(Shard(dim), spec.shape, self.degree)
        ]
        return [REPLICATE, *shards]

    def cache_choices(self, spec: TensorSpec) -> list[Placement]:
        """Where what a block keeps from call to call may lie: by samples, or by a dim of fixed size."""
        if self.role in BATCH_ROLES:
            by_samples = self.boundary(spec)
            return [by_samples if isinstance(by_samples, Shard) and by_samples.is_plain else REPLICATE]
        if self.role not in ("tensor", "tensor_sequence"):
            return [REPLICATE]
        free = (dim for dim, size in enumerate(spec.symbolic) if not getattr(size, "free_symbols", ()))
        return [REPLICATE, *(Shard(dim) for dim in free if fits(Shard(dim), spec.shape, self.degree))]

    def splits_parameters(self, spec: TensorSpec) -> bool:
        """Whether a parameter is of the kind that the role is there to split (weights, not scales and biases)."""
        return self.role in ("tensor", "tensor_sequence") and len(spec.shape) >= 2

    def may_change_parameter(self, spec: TensorSpec, have: Placement, want: Placement) -> bool:
        """Whether a parameter, or what is made of parameters alone, may be redistributed so while its block runs.

        Tensor roles compute with the parts of weights as they lie (gathering them is what ``zero`` does); the
        roles that split the sequence alone compute with whole parameters.
        """
        if self.role in _WHOLE_WEIGHTS:
            return not isinstance(want, Shard)
        if isinstance(have, Shard) and isinstance(want, Shard) and want.split_factor in self.runs:
            return have.dim == want.dim
        return not (isinstance(have, Shard) and len(spec.shape) >= 2)

    def sums_gradients(self) -> bool:
        """Whether every rank makes a term of the gradient of a whole parameter: from its part of the batch, or of the
        sequence.
        """
        return self.role in (*BATCH_ROLES, *_WHOLE_WEIGHTS, EXPERT_SEQUENCE)

    def leaves_terms(self) -> bool:
        """Whether gradients leave the axis as terms of a sum, for :mod:`passes.sharding.shard_parameters` to reduce and
        scatter.
        """
        return self.role == "zero"

    def boundary(self, spec: TensorSpec) -> Placement:
        """The placement in which an activation or its gradient enters and leaves a block."""
        if self.role in BATCH_ROLES:
            shard = self._shard_of(spec, BATCH)
            return shard if shard is not None else REPLICATE
        if self.role == GRAPH and self._has_features(spec):
            of_vertices = spec.dim_of(BATCH) is not None
            return self._shard_of(spec, BATCH if of_vertices else SEQUENCE) or REPLICATE
        if self.role in _SEQUENCE_ROLES and spec.dim_of(BATCH) is not None:
            shard = self._shard_of(spec, SEQUENCE)
            return shard if shard is not None else REPLICATE
        return REPLICATE

    def _shard_of(self, spec: TensorSpec, symbol: object) -> Shard | None:
        """The one dim that holds ``symbol``, where it divides; ambiguous (attention masks) or mixed dims stay whole."""
        dims = [d for d, size in enumerate(spec.dims) if symbol in getattr(size, "free_symbols", ())]
        if symbol is BATCH:
            dims = dims[:1]
        if len(dims) != 1:
            return None
        mixed = symbol is SEQUENCE and BATCH in getattr(spec.dims[dims[0]], "free_symbols", ())
        runs = spec.batch_split_factor(dims[0])
        if symbol is BATCH:
            shard = Shard(dims[0], runs)
        else:
            shard = Shard(dims[0], max(self.batch, 1) if mixed and runs == 1 else 1, mirrored=self.role == CONTEXT)
        return shard if fits(shard, spec.shape, self.degree) else None
