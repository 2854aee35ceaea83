"""What stands in for parameters while a model is traced: plain tensors that code of the model takes for parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["TracedParameters"]

_ATTRIBUTES: Any = Tensor
_GRAD_FN, _IS_LEAF = _ATTRIBUTES.grad_fn.__get__, _ATTRIBUTES.is_leaf.__get__


class TracedParameters(TorchFunctionMode):
    """In its scope the parameters of ``model`` are leaves and ``nn.Parameter`` to code that asks, as forwards do, and
    containers of parameters that are sliced or copied.

    ``written``: names of those that forward writes into though they are trained. They are copies in the scope, through
    which gradients pass to the parameters, and ``new`` is what they hold, by name.
    """

    def __init__(self, model: nn.Module, written: Sequence[str] = ()) -> None:
        super().__init__()
        self._model, self._written = model, written
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._ids: frozenset[int] = frozenset()
        self.new: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        held = dict(self._model.named_parameters(remove_duplicate=False)) if self._written else {}
        copies: dict[int, Any] = {id(held[name]): held[name].clone() for name in self._written}
        self.new = {name: copies[id(held[name])] for name in self._written}
        for table in (module._parameters for module in self._model.modules()):
            for name, parameter in table.items():
                if id(parameter) in copies:
                    self._replaced.append((table, name, parameter))
                    table[name] = copies[id(parameter)]
        parameters = list(self._model.parameters())
        for parameter in parameters:
            if not isinstance(parameter, nn.Parameter):
                parameter._is_param = True  # as torch has it for tensors of other classes
        self._ids = frozenset(map(id, parameters))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for table, name, parameter in self._replaced:
            table[name] = parameter
        self._replaced.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_GRAD_FN, _IS_LEAF) and id(args[0]) in self._ids:
            return None if func == _GRAD_FN else True
        return func(*args, **(kwargs or {}))
