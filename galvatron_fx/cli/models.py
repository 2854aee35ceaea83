"""The model that a command line names, and its batch."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_fx.cli.exits import ModelError, UsageError
from galvatron_fx.cli.model_config import ModelConfig, config_from_file, config_from_name
from galvatron_fx.cli.model_tasks import Batch, example_inputs, find_task, random_values

if TYPE_CHECKING:
    from torch import nn

__all__ = ["DTYPES", "Subject", "load"]

DTYPES = ("bfloat16", "float16", "float32", "float64")
_MOST_MODULES = 30_000  # two thousand layers of a language model, built in seconds
_BATCH, _SEQUENCE = 64, 2048  # samples, tokens: where the command line and the configuration say nothing


@dataclass(frozen=True)
class Subject:
    """What is planned for: a model and its global batch.

    ``name``: what the command line called it; ``inputs_of``: makes the inputs of a batch of so many samples;
    ``values_of``: makes inputs with values from a seed.
    """

    name: str
    model: nn.Module
    inputs: Any
    inputs_of: Callable[[int], Any]
    values_of: Callable[[int], Any]

    def of_batch(self, size: int) -> Subject:
        """Return the same with a batch of ``size`` samples."""
        return replace(self, inputs=self.inputs_of(size))

    @property
    def batch_size(self) -> int:
        """Samples of the batch: the commonest first size of its tensors."""
        from galvatron_fx.ir.graph.symbols import batch_size
        from passes.frontend.capture.capture import FlatInputs

        return batch_size([shape[0] for shape in FlatInputs.of(self.inputs).shapes if shape])

    def __str__(self) -> str:
        """Return two lines that say what it is."""
        return (
            f"model    {self._described()}\nbatch    {', '.join(f'{name} {shape}' for name, shape in self._shapes())}"
        )

    def document(self) -> dict[str, Any]:
        """Return the same as plain JSON values."""
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "parameters": self._parameters(),
            "dtypes": self._dtypes(),
            "batch": dict(self._shapes()),
        }

    def _described(self) -> str:
        count = self._parameters()
        size = f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M" if count >= 1e5 else str(count)
        return f"{self.name} ({type(self.model).__name__}), {size} parameters in {' and '.join(self._dtypes())}"

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _dtypes(self) -> list[str]:
        return sorted({str(parameter.dtype).removeprefix("torch.") for parameter in self.model.parameters()})

    def _shapes(self) -> list[tuple[str, str]]:
        from passes.frontend.capture.capture import FlatInputs

        flat = FlatInputs.of(self.inputs)
        sizes = ["×".join(map(str, tensor.shape)) for tensor in flat.tensors]
        return [(name.strip("[]'"), size) for name, size in zip(flat.tensor_names, sizes, strict=True)]


def load(options: argparse.Namespace) -> Subject:
    """Build the model that ``options`` names, on the meta device where it is one of transformers.

    Raises InputError for a configuration that cannot be read, UsageError for options that do not go together and
    ModelError where the model cannot be built.
    """
    text = str(options.model)
    path = Path(text)
    if path.is_dir() or path.is_file() or text.endswith(".json"):
        return _of_config(options, config_from_file(path, options.set))
    if ":" in text:
        return _of_function(options)
    return _of_config(options, config_from_name(text, options.set))


def _of_config(options: argparse.Namespace, model_config: ModelConfig) -> Subject:
    import torch

    config = model_config.config
    task, kind = find_task(config, model_config.architectures, options.task)
    dtype = getattr(torch, options.dtype or _dtype(options, model_config))
    try:
        with torch.device("meta"), _bounded(kind.__name__):
            model = kind(config).to(dtype)
    except ModelError:
        raise
    except Exception as error:  # whatever some hundred models raise for settings that do not go together
        raise ModelError(f"{kind.__name__} cannot be built: {type(error).__name__}: {error}") from error
    batch = _batch(options, config)

    is_trained = not getattr(options, "forward_only", False)

    def inputs_of(size: int) -> Any:
        return example_inputs(model, task if is_trained else task.unlabelled, replace(batch, size=size), dtype)

    inputs = inputs_of(batch.size)

    def values_of(seed: int) -> Any:
        return random_values(inputs, config, task, batch, seed)

    return Subject(options.model, model.train(is_trained), inputs, inputs_of, values_of)


@contextlib.contextmanager
def _bounded(name: str) -> Iterator[None]:
    """Refuse to build a model of more modules than can be planned: a typo would build for hours."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise ModelError(
                f"{name} of this configuration has over {_MOST_MODULES:,} modules: give fewer layers, or experts"
            )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _dtype(options: argparse.Namespace, model_config: ModelConfig) -> str:
    """What parameters are kept in where nothing is said."""
    if getattr(options, "mixed_precision", None):
        return "float32"
    return model_config.dtype if model_config.dtype in DTYPES else DTYPES[0]


def _batch(options: argparse.Namespace, config: Any) -> Batch:
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else None
    sequence = options.sequence_length or min(_SEQUENCE, most or _SEQUENCE)
    if most is not None and sequence > most:
        warnings.warn(
            f"the batch has {sequence} tokens a sample and the model {most} positions: --set "
            f"max_position_embeddings={sequence} if it should have as many",
            stacklevel=2,
        )
    return Batch(options.batch_size or _BATCH, sequence)


def _of_function(options: argparse.Namespace) -> Subject:
    given = ("set", "task", "dtype", "batch_size", "sequence_length")
    extra = [f"--{name.replace('_', '-')}" for name in given if getattr(options, name)]
    if extra:
        raise UsageError(f"{', '.join(extra)}: {options.model} makes the model and its batch itself")
    module_name, _, function_name = options.model.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        result = function()
    except Exception as error:  # the user's own code
        raise ModelError(f"{options.model} failed with {type(error).__name__}: {error}") from error

    def inputs_of(size: int) -> Any:
        try:
            return _checked(options.model, function(size))[1]
        except Exception as error:  # the user's own code
            raise ModelError(
                f"{options.model} called with a batch of {size} failed with {type(error).__name__}: {error}"
            ) from error

    model, inputs = _checked(options.model, result)
    if getattr(options, "forward_only", False):
        model.eval()
    return Subject(options.model, model, inputs, inputs_of, lambda seed: _with_numbers(inputs, seed))


def _with_numbers(inputs: Any, seed: int) -> Any:
    """The inputs with normal numbers for those of floating point on the meta device; others as they are."""
    import torch

    from galvatron_fx.ir.torch_compat.tensors import pytree

    generator = torch.Generator().manual_seed(seed)

    def drawn(leaf: Any) -> Any:
        is_empty = isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" and leaf.is_floating_point()
        return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype) if is_empty else leaf

    return pytree.tree_map(drawn, inputs)


def _checked(name: str, result: Any) -> tuple[nn.Module, Any]:
    from torch import nn

    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], nn.Module):
        raise ModelError(f"{name} returned {type(result).__name__}: return a pair of a model and its example inputs")
    return result
