"""What a configuration is trained for: the class to build, and a batch on the meta device by what its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from galvatron_fx.cli.exits import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

__all__ = ["TASKS", "Batch", "Task", "example_inputs", "find_task", "random_values"]

TOKENS, CLASS, SPAN, NOTHING = "a label a token", "a label a sample", "first and last token", "no labels"


@dataclass(frozen=True)
class Task:
    """``table``: of transformers, from configurations to classes; ``labels``: what a batch has to be learned."""

    name: str
    table: str
    labels: str

    @property
    def unlabelled(self) -> Task:
        """The same without labels to learn."""
        return replace(self, labels=NOTHING)

    def classes(self, config: PretrainedConfig) -> list[type[nn.Module]]:
        """The classes that transformers has for the task and the configuration."""
        from transformers.models.auto import modeling_auto

        table = getattr(modeling_auto, self.table)
        if type(config) not in table:
            return []
        classes = table[type(config)]
        return list(classes) if isinstance(classes, (list, tuple)) else [classes]


_TASKS = (
    Task("seq2seq-lm", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", TOKENS),
    Task("masked-lm", "MODEL_FOR_MASKED_LM_MAPPING", TOKENS),
    Task("causal-lm", "MODEL_FOR_CAUSAL_LM_MAPPING", TOKENS),
    Task("image-classification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", CLASS),
    Task("sequence-classification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", CLASS),
    Task("token-classification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", TOKENS),
    Task("question-answering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING", SPAN),
    Task("base", "MODEL_MAPPING", NOTHING),
)
TASKS = {task.name: task for task in _TASKS}
"""In the order in which they are tried: encoders may have a causal head beside their own, which comes later."""


@dataclass(frozen=True)
class Batch:
    """Samples, and tokens of each."""

    size: int
    sequence: int


def find_task(
    config: PretrainedConfig, architectures: tuple[str, ...] = (), name: str | None = None
) -> tuple[Task, type[nn.Module]]:
    """The task that is named, else the one whose class the configuration names, else the first that there is one for.

    The bare model, and the decoder of an encoder-decoder alone, are not taken unless they are named. Raises ModelError
    where transformers has no class for it.
    """
    wanted = [TASKS[name]] if name is not None else list(_TASKS)
    pairs = [(task, kind) for task in wanted for kind in task.classes(config)]
    named = [pair for pair in pairs if pair[1].__name__ in architectures]
    meant = [pair for pair in pairs if name is not None or pair[0].name not in _left_out(config)]
    if not named and not meant:
        have = [f"--task {task.name}" for task in _TASKS if task.classes(config)]
        raise ModelError(
            f"transformers has no class of {type(config).__name__} for {name or 'a task that is known here'}: use "
            f"{' or '.join([*have, 'module:function'])}"
        )
    return (named or meant)[0]


def _left_out(config: PretrainedConfig) -> tuple[str, ...]:
    return ("base", "causal-lm") if getattr(config, "is_encoder_decoder", False) else ("base",)


def example_inputs(model: nn.Module, task: Task, batch: Batch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A batch for ``model`` on the meta device; raises ModelError for a model that takes something unusual."""
    import torch

    config: Any = model.config
    main = str(getattr(model, "main_input_name", ""))
    taken = inspect.signature(model.forward).parameters
    shapes = _main_shape(main, config, batch)

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device="meta")

    is_text = main == "input_ids"
    inputs = {main: ids(*shapes) if is_text else torch.zeros(shapes, dtype=dtype, device="meta")}
    inputs |= {name: ids(*shape) for name, shape in _labels(task, batch).items() if name in taken}
    if "decoder_input_ids" in taken and ("labels" not in inputs or _start_token(config) is None):
        inputs["decoder_input_ids"] = ids(batch.size, batch.sequence)
    return inputs


def random_values(
    inputs: Mapping[str, torch.Tensor], config: Any, task: Task, batch: Batch, seed: int
) -> dict[str, torch.Tensor]:
    """Tensors like ``inputs`` with values that the model can take: tokens and labels in range, normal numbers."""
    import torch

    text = config.get_text_config()
    vocabulary, classes = int(getattr(text, "vocab_size", 2)), int(getattr(config, "num_labels", 2))
    is_of_class = task.labels == CLASS or task.name == "token-classification"
    limits = {"labels": classes if is_of_class else vocabulary}
    limits |= {"start_positions": batch.sequence, "end_positions": batch.sequence}
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, like: torch.Tensor) -> torch.Tensor:
        if like.is_floating_point():
            return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
        return torch.randint(limits.get(name, vocabulary), like.shape, generator=generator)

    return {name: drawn(name, tensor) for name, tensor in inputs.items()}


def _start_token(config: Any) -> int | None:
    """What an encoder-decoder begins its labels with to make the decoder's inputs of them."""
    token: int | None = getattr(config, "decoder_start_token_id", None)
    return token


def _main_shape(main: str, config: Any, batch: Batch) -> tuple[int, ...]:
    if main == "input_ids":
        return batch.size, batch.sequence
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None)
        height, width = size if isinstance(size, (list, tuple)) else (size or 224, size or 224)
        return batch.size, int(getattr(vision, "num_channels", 3)), int(height), int(width)
    raise ModelError(f"no example batch is known for a model that takes {main or 'nothing'!r}: give module:function")


def _labels(task: Task, batch: Batch) -> Mapping[str, tuple[int, ...]]:
    token, sample = (batch.size, batch.sequence), (batch.size,)
    by_kind: dict[str, Mapping[str, tuple[int, ...]]] = {
        TOKENS: {"labels": token},
        CLASS: {"labels": sample},
        SPAN: {"start_positions": sample, "end_positions": sample},
        NOTHING: {},
    }
    return by_kind[task.labels]
