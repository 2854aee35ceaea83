"""How a command line names a model, and the batch that is made for it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from galvatron_fx.cli import models, options
from galvatron_fx.cli.exits import ModelError, UsageError
from galvatron_fx.cli.model_config import parse_override
from galvatron_fx.cli.models import Subject, load
from galvatron_fx.errors import InputError

SMALL = ("num_hidden_layers=2", "hidden_size=32", "intermediate_size=64", "num_attention_heads=4", "vocab_size=64")
BATCH = ("--batch-size", "4", "--sequence-length", "16")


def loaded(model: str | Path, *arguments: str, overrides: tuple[str, ...] = ()) -> Subject:
    parser = argparse.ArgumentParser()
    options.add_model(parser)
    pairs = [part for text in overrides for part in ("--set", text)]
    return load(parser.parse_args(["--model", str(model), *pairs, *arguments]))


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


LLAMA = {"model_type": "llama", **dict(parse_override(text) for text in SMALL)}


@pytest.mark.parametrize("name", ["llama", "LlamaConfig"])
def test_by_name(name: str) -> None:
    found = loaded(name, *BATCH, overrides=(*SMALL, "num_key_value_heads=2"))
    assert type(found.model).__name__ == "LlamaForCausalLM"
    assert all(p.device.type == "meta" and p.dtype == torch.bfloat16 for p in found.model.parameters())
    assert {key: tuple(value.shape) for key, value in found.inputs.items()} == {"input_ids": (4, 16), "labels": (4, 16)}
    assert found.model.training and not found.model.config.use_cache


@pytest.mark.parametrize("is_folder", [True, False])
def test_by_file(tmp_path: Path, is_folder: bool) -> None:
    path = written(tmp_path, **LLAMA, torch_dtype="float32", architectures=["LlamaForSequenceClassification"])
    found = loaded(tmp_path if is_folder else path, *BATCH, overrides=("num_labels=3",))
    assert type(found.model).__name__ == "LlamaForSequenceClassification"
    assert found.inputs["labels"].shape == (4,)
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert loaded(path, "--task", "causal-lm", "--dtype", "float16").model.dtype == torch.float16


def test_an_override_inside() -> None:
    small = ("hidden_size=32", "num_hidden_layers=1", "num_attention_heads=4", "intermediate_size=64")
    pairs = tuple(f"{part}.{text}" for part in ("text_config", "vision_config") for text in small)
    with pytest.raises(
        ModelError, match="of CLIPConfig for causal-lm: use --task image-classification or --task base or module"
    ):
        loaded("clip", "--task", "causal-lm", overrides=pairs)


@pytest.mark.parametrize(
    ("name", "task", "class_name", "shapes"),
    [
        ("bert", None, "BertForMaskedLM", {"input_ids": (4, 16), "labels": (4, 16)}),
        ("bert", "question-answering", "BertForQuestionAnswering",
         {"input_ids": (4, 16), "start_positions": (4,), "end_positions": (4,)}),
        ("bert", "base", "BertModel", {"input_ids": (4, 16)}),
        ("bart", None, "BartForConditionalGeneration", {"input_ids": (4, 16), "labels": (4, 16)}),
        ("t5", None, "T5ForConditionalGeneration",
         {"input_ids": (4, 16), "labels": (4, 16), "decoder_input_ids": (4, 16)}),
        ("bart", "base", "BartModel", {"input_ids": (4, 16), "decoder_input_ids": (4, 16)}),
    ],
)  # fmt: skip
def test_batches_by_task(name: str, task: str | None, class_name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    small = {"bart": ("d_model=32", "encoder_layers=1"), "t5": ("d_model=32", "num_layers=1")}.get(name, SMALL)
    found = loaded(name, *BATCH, *(["--task", task] if task else []), overrides=small)
    assert type(found.model).__name__ == class_name
    assert {key: tuple(value.shape) for key, value in found.inputs.items()} == shapes


def test_images() -> None:
    found = loaded("vit", "--batch-size", "4", overrides=(*SMALL[:-1], "image_size=32", "patch_size=8"))
    assert found.inputs["pixel_values"].shape == (4, 3, 32, 32) and found.inputs["pixel_values"].dtype == torch.bfloat16
    assert found.inputs["labels"].shape == (4,)


def test_by_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "somewhere_else.py").write_text("from tests.cli.tiny import build\n")
    monkeypatch.chdir(tmp_path)
    assert type(loaded("somewhere_else:build").model).__name__ == "Perceptron"


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("lama", InputError, "transformers knows no model lama, and there is no such file: did you mean llama"),
        ("nosuch.json", InputError, "cannot read a model's configuration from nosuch.json: No such file"),
        ("tests.cli.tiny:nosuch", ModelError, "tests.cli.tiny:nosuch failed with AttributeError"),
        ("tests.cli.nosuch:build", ModelError, "failed with ModuleNotFoundError"),
        (
            "tests.cli.tiny:build_alone",
            ModelError,
            "returned Perceptron: return a pair of a model and its example inputs",
        ),
        ("tests.cli.tiny:build_nothing", ModelError, "failed with RuntimeError: no data here"),
        ("whisper", ModelError, "has no class of WhisperConfig for a task that is known here: use --task causal-lm or"),
        ("llava", ModelError, "has no class of LlavaConfig for a task that is known here: use --task base or module:"),
    ],
)
def test_a_model_that_cannot_be(model: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        loaded(model)


def test_a_model_that_takes_sound() -> None:
    with pytest.raises(ModelError, match="no example batch is known for a model that takes 'input_features'"):
        loaded("whisper", "--task", "base", overrides=("encoder_layers=1", "decoder_layers=1"))


def test_a_function_decides_itself() -> None:
    with pytest.raises(UsageError, match=r"--set, --batch-size: tests\.cli\.tiny:build makes the model and its batch"):
        loaded("tests.cli.tiny:build", "--batch-size", "3", overrides=("a=1",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_hidden_layer=3", "LlamaConfig has no 'num_hidden_layer': did you mean num_hidden_layers"),
        ("hidden_size=33", "LlamaConfig refuses this: .*33"),
        ("hidden_size=wide", "LlamaConfig refuses this: .*expected int"),
        ("num_hidden_layers=1e13", "num_hidden_layers is 10000000000000.0: at most"),
        ("num_hidden_layers=2000000", "num_hidden_layers is 2000000: at most 10000 is taken"),
        ("dtype=float32", "see --dtype and --task"),
        ("__class__=int", "see --dtype and --task"),
        ("hidden_size.x=1", "'hidden_size' is 32, which has nothing inside"),
        ("to_dict=1", "'to_dict' is no setting of LlamaConfig"),
    ],
)
def test_an_override_that_cannot_be(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        loaded(written(tmp_path, **LLAMA), overrides=(override,))


def test_more_tokens_than_positions_are_noted(tmp_path: Path) -> None:
    path = written(tmp_path, **LLAMA, max_position_embeddings=8)
    with pytest.warns(UserWarning, match="the batch has 16 tokens a sample and the model 8 positions"):
        loaded(path, *BATCH)
    assert loaded(path).inputs["input_ids"].shape == (64, 8)


@pytest.mark.parametrize("layers", [3, 200])
def test_a_model_that_would_be_built_without_end(tmp_path: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_MOST_MODULES", 1000)
    path = written(tmp_path, **{**LLAMA, "num_hidden_layers": layers})
    if layers == 3:
        assert len(list(loaded(path).model.modules())) > 30
        return
    with pytest.raises(ModelError, match="LlamaForCausalLM of this configuration has over 1,000 modules: give fewer"):
        loaded(path)
    assert len(nn.Sequential(*(nn.Identity() for _ in range(2000)))) == 2000  # counted no longer


def test_sizes_that_do_not_go_together(tmp_path: Path) -> None:
    path = written(tmp_path, **{**LLAMA, "num_key_value_heads": 0})
    with pytest.raises((ModelError, InputError), match=r"LlamaForCausalLM cannot be built|LlamaConfig refuses this"):
        loaded(path)
