"""What a compiled model is beside its program: a module that reads, switches and loads as the original does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Self, SupportsIndex

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.compiled import AnyProgram, StageCopies
from galvatron_fx.runtime.dtensor_views import lie_like, share_of
from galvatron_fx.runtime.late_changes import refuse_assignment, refuse_part
from galvatron_fx.runtime.module_tree import ModuleTree, holds, leave_absent, refuse_conversion
from galvatron_fx.runtime.original_attributes import is_of_original
from galvatron_fx.runtime.stage_tensors import as_stage_tensor
from galvatron_fx.runtime.wrappers import check_read, check_set, refuse_wrapper

__all__ = ["LikeOriginal"]


class LikeOriginal(nn.Module):
    """Attributes and methods of the original, its class to ``isinstance``, its modes and its state dict."""

    _tree: ModuleTree
    _stages: StageCopies | None
    _main: AnyProgram | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the original, for code that looks for it; ``type(model)`` is the compiled model's own."""
        tree: ModuleTree | None = self.__dict__.get("_tree")
        return type(self) if tree is None else type(tree.twin)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_tree" not in self.__dict__:
                raise
        check_read(name)
        return self._tree.attributes.read(self, self._tree.twin, "", name)

    def __setattr__(self, name: str, value: Any) -> None:
        check_set(name)
        if self.__dict__.get("_main") is not None and name != "training":
            is_inner = name in self.__dict__ or hasattr(type(self), name) or not is_of_original(self._tree.twin, name)
            if holds(self, name, value):
                return
            if not (name.startswith("_") and is_inner):
                if self._tree.attributes.assign(self._tree.twin, "", name, value):
                    return
                refuse_assignment(self, self._tree.twin, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._parameters or name in self._buffers or name in self._modules:
            refuse_part(name)
        super().__delattr__(name)

    def _refuse_part(self, name: str, *_: Any, **__: Any) -> NoReturn:
        refuse_part(name)

    register_parameter = register_buffer = add_module = register_module = _refuse_part

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        refuse_conversion(self, fn)
        return self

    def share_memory(self) -> NoReturn:
        """Refuse: the program's tensors stay where they are."""
        raise InputError(
            "share_memory of a compiled model: other processes would write to tensors that its ranks hold; share the "
            "original, or what galvatron_fx.gather(model) returns"
        )

    def _replicate_for_data_parallel(self) -> NoReturn:
        refuse_wrapper("DataParallel")

    def _get_name(self) -> str:
        return type(self).__name__

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the program is compiled, by ``backend="inductor"``."""
        raise InputError(
            "torch.compile of a compiled model: its graphs are traced already, so give "
            'galvatron_fx.compile(model, mesh, batch, backend="inductor"), which compiles them by torch\'s inductor'
        )

    # torch.compile takes a module with these two for a lazy one. Torch before 2.15 reads the first when it wraps the
    # model; 2.15 sees that it is there, and calls the second at the first step.
    _initialize_hook = property(compile)
    _infer_parameters = compile

    @property
    def training(self) -> bool:
        """Whether the model trains or evaluates."""
        tree: ModuleTree | None = self.__dict__.get("_tree")
        return bool(tree.twin.training) if tree is not None else self.__dict__.get("_mode", True)

    @training.setter
    def training(self, mode: bool) -> None:
        tree: ModuleTree | None = self.__dict__.get("_tree")
        if tree is None:
            self.__dict__["_mode"] = mode
        else:
            tree.twin.training = mode
            tree.switched()

    def train(self, mode: bool = True) -> Self:
        """Train or evaluate from the next step on, as the original would."""
        self._tree.train(self._tree.twin, mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return parameters and buffers by their original names; under a plan with stages, those of this rank's.

        Torch's ``full_state_dict=True`` and ``torch.save`` of it raise InputError there.
        """
        self.require_own_order("saved or loaded")
        state = super().state_dict(*args, **kwargs)
        if self._stages is not None:
            for name, value in state.items():
                if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
                    state[name] = as_stage_tensor(value)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of DTensors, or one of plain, whole tensors, as that of the original, of which each rank
        takes its shards; under a plan with stages, of those that it holds. Raises InputError for ``assign``.
        """
        if assign:
            raise InputError(
                "load_state_dict(assign=True) would put other tensors in the place of those that the compiled program "
                "updates: leave assign out, which copies the values"
            )
        return super().load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Called with what belongs to this module and those inside, also where it is one of another's."""
        self.require_own_order("saved or loaded")
        held = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
        for name in [name for name in state_dict if name.startswith(prefix)]:
            own_name = name.removeprefix(prefix)
            if own_name in held:
                state_dict[name] = _as_held(held[own_name], state_dict[name])
        leave_absent(self, self._tree.twin, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def require_own_order(self, what: str) -> None:
        """Raise InputError where tensors are not as the original has them."""
        raise NotImplementedError

    def new_skeleton(self) -> nn.Module:
        """A copy of the original as it is switched now, whose parameters have no memory."""
        return copy.deepcopy(self._tree.twin)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InputError(
            "a compiled model belongs to its process groups and cannot be pickled, nor copied by copy.copy: save its "
            "weights with galvatron_fx.save_weights or a Checkpointer, and compile again where they are loaded; "
            "copy.deepcopy makes a model with weights of its own on the same mesh"
        )


def _as_held(tensor: Tensor, value: Any) -> Any:
    """A whole ``value`` as the rank holds ``tensor``; unlike shapes are left to torch's own error."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_whole or not isinstance(tensor, DTensor) or value.shape != tensor.shape:
        return value
    return lie_like(tensor, share_of(tensor, value.to(tensor.device_mesh.device_type)))
