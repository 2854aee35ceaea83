"""The modules that a person sees inside of a compiled model: they hold parameters and compute nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.modes import Modes, Switches
from galvatron_fx.runtime.original_attributes import AttributesRead, is_of_original, with_container_methods
from galvatron_fx.runtime.wrappers import check_read, refuse_fully_shard

__all__ = ["ModuleTree", "ShownModule", "holds", "leave_absent", "module_at", "refuse_conversion"]

_HOOKS = "the modules of a compiled model do not run one by one, so a hook of theirs would never be called"


class ModuleTree:
    """The modules of the original as a person sees them, and what is switched on them between steps.

    ``twin``: a copy of the original without weights. It keeps whether each module trains or evaluates, also where a
    module has a ``train`` of its own; what is traced later is traced from it.
    """

    def __init__(self, twin: nn.Module) -> None:
        self.twin = twin
        self.attributes = AttributesRead()
        self._root: nn.Module | None = None
        self._shown: dict[nn.Module, ShownModule] = {}
        self._switches = Switches(twin)
        self._modes: Modes | None = None

    def fill(self, root: nn.Module) -> None:
        """Put what shows the modules inside of the original into ``root``, which is to hold their parameters."""
        self._root = with_container_methods(root, self.twin)
        refuse_fully_shard(root)
        self._show_inside(root, self.twin, "")

    def _show(self, twin: nn.Module, path: str) -> ShownModule:
        if twin not in self._shown:
            shown = self._shown[twin] = with_container_methods(ShownModule(twin, path, self), twin)
            refuse_fully_shard(shown)
            self._show_inside(shown, twin, f"{path}.")
        return self._shown[twin]

    def _show_inside(self, shown: nn.Module, twin: nn.Module, prefix: str) -> None:
        children = {
            name: None if child is None else self._show(child, prefix + name) for name, child in twin._modules.items()
        }
        shown.__dict__["_modules"] = FixedModules(children, prefix)

    def train(self, module: nn.Module, mode: bool) -> None:
        """Switch one of the twin's modules, and those inside of it, and the parameters that its ``train`` freezes."""
        held = dict(self._root.named_parameters()) if self._root is not None else {}
        self.train_parameters({name: parameter.requires_grad for name, parameter in held.items()})
        for name, flag in self._switches.train(module, mode).items():
            if name in held:
                held[name].requires_grad_(flag)
        self._modes = None

    def switched(self) -> None:
        """Say that modules of the twin were switched."""
        self._modes = None

    @property
    def modes(self) -> Modes:
        """How the modules are switched, and which attributes were changed in place."""
        if self._modes is None:
            self._modes = self._switches.modes
        changed = self.attributes.changed()
        return self._modes._replace(attributes=(*self._modes.attributes, *changed)) if changed else self._modes

    def train_parameters(self, trained: Mapping[str, bool]) -> None:
        """Say which parameters the twin trains, by name."""
        for name, parameter in self.twin.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))


class FixedModules(dict[str, nn.Module | None]):
    """The modules inside of a compiled one, which stay: containers (``insert``, ``clear``) and libraries that exchange
    layers write into this table, where no method of the module sees it.
    """

    def __init__(self, modules: Mapping[str, nn.Module | None], prefix: str) -> None:
        super().__init__(modules)
        self._prefix = prefix

    def _refuse(self, *given: Any, **_: Any) -> NoReturn:
        name = f"{self._prefix}{given[0]}" if given and isinstance(given[0], str) else f"{self._prefix}*"
        raise InputError(f"modules of a compiled model are exchanged ('{name}'): change the model before compile")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedModules:
        new = memo[id(self)] = FixedModules({}, self._prefix)
        for name, child in self.items():
            super(FixedModules, new).__setitem__(name, copy.deepcopy(child, memo))
        return new


def holds(module: nn.Module, name: str, value: object) -> bool:
    """Whether a part of a module is what it is assigned, as by ``module.weight *= 0.5``, which has written in place."""
    parts = module._parameters, module._buffers, module._modules
    return any(name in held and held[name] is value for held in parts)


class ShownModule(nn.Module):
    """Stands for one module of the original: its parameters, its mode, its name and class to read."""

    _twin: nn.Module
    _path: str
    _tree: ModuleTree

    def __init__(self, twin: nn.Module, path: str, tree: ModuleTree) -> None:
        self.__dict__.update(_twin=twin, _path=path, _tree=tree)
        super().__init__()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the original, so that code that looks for dropouts or norms finds them."""
        return type(self._twin)

    @property
    def training(self) -> bool:
        """Whether the module trains or evaluates."""
        return bool(self._twin.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_modules" in self.__dict__:  # not while nn.Module sets it to True
            self._twin.training = mode
            self._tree.switched()

    def train(self, mode: bool = True) -> Self:
        """Train or evaluate from the next step on, as the original would."""
        self._tree.train(self._twin, mode)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        leave_absent(self, self._twin, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the program runs as a whole."""
        raise InputError(
            f"module '{self._path}' of a compiled model cannot be called by itself, as the model runs as one program: "
            f"return what it computes from the model's forward"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_tree" not in self.__dict__:
                raise
        check_read(name)
        return self._tree.attributes.read(self, self._twin, self._path, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or (name.startswith("_") and not is_of_original(self._twin, name)):
            super().__setattr__(name, value)
            return
        if holds(self, name, value) or self._tree.attributes.assign(self._twin, self._path, name, value):
            return
        held = self._parameters.keys() | self._buffers.keys()
        remedy = "write the values in place, as in 'with torch.no_grad(): parameter.copy_(values)'"
        raise InputError(
            f"'{self._path}.{name}' is assigned after compile, and the compiled program does not see it: "
            f"{remedy if name in held else 'set it before compile, and compile again'}"
        )

    def __delattr__(self, name: str) -> None:
        raise InputError(f"'{self._path}.{name}' is deleted after compile: change the model before compile")

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            f"{_HOOKS} ('{self._path}'): return the value from the model's forward, or hook the compiled model itself "
            f"or its parameters"
        )

    register_forward_pre_hook = register_forward_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook

    def _refuse_change(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(f"module '{self._path}' is given other parts after compile: change the model before compile")

    register_parameter = register_buffer = add_module = register_module = _refuse_change

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        refuse_conversion(self, fn)
        return self

    def _get_name(self) -> str:
        return type(self._twin).__name__

    def extra_repr(self) -> str:
        return self._twin.extra_repr()


def leave_absent(module: nn.Module, twin: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Drop from what ``module`` is about to load those tensors of its own that ranks of other stages hold."""
    for name in (twin._parameters.keys() | twin._buffers.keys()) - module._parameters.keys() - module._buffers.keys():
        state_dict.pop(prefix + name, None)


def refuse_conversion(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise InputError where ``fn``, which ``module.to`` and its kin apply to tensors, changes dtype or device."""
    tensors: Iterator[Tensor] = (tensor for part in (module.parameters(), module.buffers()) for tensor in part)
    for dtype, device in sorted({(tensor.dtype, tensor.device) for tensor in tensors}, key=str):
        result = fn(torch.empty(0, dtype=dtype, device=device))
        if result.dtype != dtype:
            raise InputError(
                f"the parameters of a compiled model stay {dtype}, which the program was made for, and cannot become "
                f"{result.dtype}: compile with mixed_precision=MixedPrecisionPolicy(param_dtype={result.dtype}), or "
                f"convert the model before compile"
            )
        if result.device.type != device.type or result.device.index not in (None, device.index):
            raise InputError(
                f"the parameters of a compiled model stay on {device}, and cannot go to {result.device}: the mesh says "
                f"where a model runs, so compile for a mesh of {result.device.type}"
            )


def module_at(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path, whatever other attributes of its owner are called."""
    module: nn.Module | None = root
    for part in filter(None, path.split(".")):
        assert module is not None, f"'{path}' holds a tensor"
        module = module._modules[part]
    assert module is not None, f"'{path}' holds a tensor"
    return module
