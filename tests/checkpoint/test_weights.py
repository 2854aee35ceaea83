from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from galvatron_fx import load_weights, save_weights
from galvatron_fx.errors import CheckpointError
from tests.models import zoo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """GPT-2 in several files, as transformers writes it."""
    zoo.gpt2(layers=1)[0].save_pretrained(tmp_path / "source", max_shard_size="40KB")
    return tmp_path / "source"


def edit(folder: Path, change: Any) -> Path:
    """Change the tensors of the file that holds the final norm; returns the file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / str(index["weight_map"]["transformer.ln_f.weight"])
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_one_file_of_a_model_on_one_device_comes_back(tmp_path: Path) -> None:
    model = zoo.llama(layers=1)[0]
    save_weights(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_files_go_no_further_than_their_limit(tmp_path: Path) -> None:
    save_weights(zoo.llama(layers=1)[0], tmp_path / "ours", max_shard_size=20_000)
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in (tmp_path / "ours").glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) <= 20_000


def test_weights_of_another_dtype_are_refused_or_cast(folder: Path, tmp_path: Path) -> None:
    model = zoo.gpt2(layers=1)[0].float()
    with pytest.raises(CheckpointError, match=r"transformer\.wte\.weight is float64 there and float32 in the model"):
        load_weights(model, folder)
    load_weights(model, folder, cast=True)
    save_weights(model, tmp_path / "single", like=folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "single")
    assert again.dtype == torch.float32, "config.json says what was written"
    assert torch.equal(again.lm_head.weight, zoo.gpt2(layers=1)[0].lm_head.weight.float())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("transformer.ln_f.weight"), "does not hold transformer.ln_f.weight, which"),
        (
            lambda t: t.update({"transformer.ln_f.weight": torch.ones(3)}),
            r"ln_f.weight has shape \[3\] there and \[32\]",
        ),
    ],
)
def test_changed_tensors_are_named(folder: Path, change: Any, words: str) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError, match=words):
        load_weights(zoo.gpt2(layers=1)[0], folder)


def test_missing_and_unknown_tensors_are_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"transformer\.h\.1\.ln_1\.weight is missing.*and 7 more"):
        load_weights(zoo.gpt2(layers=2)[0], folder)
    with pytest.raises(CheckpointError, match=r"transformer\.\S+ is not one of the model's"):
        load_weights(nn.Linear(2, 2), folder)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1])
def test_a_file_cut_short_is_named(folder: Path, kept_bytes: int) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=f"{path.name} is cut short or damaged"):
        load_weights(zoo.gpt2(layers=1)[0], folder)


def test_pipes_and_folders_are_no_weights(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read: it is no regular file"):
        load_weights(zoo.gpt2(layers=2)[0], folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read: Is a directory"):
        load_weights(zoo.gpt2(layers=2)[0], folder)


def test_missing_files_are_named(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        load_weights(zoo.gpt2(layers=1)[0], folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        load_weights(zoo.gpt2(layers=1)[0], folder)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        load_weights(zoo.gpt2(layers=1)[0], folder)
    index.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load_weights(zoo.gpt2(layers=1)[0], folder)


def test_saving_over_something_is_refused(folder: Path, tmp_path: Path) -> None:
    model = zoo.gpt2(layers=1)[0]
    with pytest.raises(CheckpointError, match="is there already"):
        save_weights(model, folder)
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        save_weights(model, tmp_path / "new", like=tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_tied_weight_is_found_under_its_other_name(folder: Path) -> None:
    tensors = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    other = folder / "other"
    other.mkdir()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    model = zoo.gpt2(layers=1)[0]
    nn.init.zeros_(model.lm_head.weight)
    load_weights(model, other)
    assert torch.equal(model.transformer.wte.weight, tensors["lm_head.weight"])
