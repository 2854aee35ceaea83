"""Folders of weights made by transformers, loaded into shards and saved again, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx
from tests.checkpoint.forked import run_ranks
from tests.checkpoint.resume_ranks import MORE_STAGES, STAGES, TENSOR, Setting
from tests.models import zoo
from tests.runtime.beside_plain import full

Case = Callable[[], zoo.Case]


def load_and_save(case: Case, setting: Setting, source: Path, target: Path) -> None:
    """Compile from the meta device, load, compare with what transformers loads, save in small files."""
    with torch.device("meta"):
        model, inputs = case()
    inputs = zoo.tokens()
    compiled = galvatron_fx.compile(model, init_device_mesh("cpu", setting.mesh), inputs, plan=setting.plan())
    galvatron_fx.load_weights(compiled, source)
    expected = transformers.AutoModelForCausalLM.from_pretrained(source)
    for name, parameter in compiled.named_parameters():
        assert torch.equal(full(parameter), expected.get_parameter(name)), name
    held = {id(parameter) for parameter in compiled.parameters()}
    assert len(held) == len(list(compiled.parameters()))
    galvatron_fx.save_weights(compiled, target, like=source, max_shard_size="40kB")


def round_trip(case: Case, setting: Setting, max_shard_size: str, folder: Path) -> None:
    """transformers writes, our ranks read and write, transformers reads the same bits."""
    model, _ = case()
    source, target = folder / "source", folder / "target"
    model.save_pretrained(source, max_shard_size=max_shard_size)
    assert (source / "model.safetensors.index.json").exists() == (max_shard_size == "40KB")
    codes = run_ranks(setting.num_ranks, partial(load_and_save, case, setting, source, target))
    assert codes == [0] * setting.num_ranks, f"exit codes {codes}"

    again, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    assert again.dtype == model.dtype
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
    assert len(sizes) == len(set(index["weight_map"].values())) > 1
    assert not list(folder.glob(".writing*"))


def half(case: Case) -> zoo.Case:
    """In bfloat16, which NumPy does not know."""
    model, inputs = case()
    return model.bfloat16(), inputs


def refused_together(folder: Path) -> None:
    """A wrong shape on the second stage alone is an error on all ranks, and changes nothing."""
    model, _ = zoo.gpt2(layers=2)
    model.transformer.ln_f.weight = torch.nn.Parameter(torch.ones(7, dtype=torch.float64))
    model.save_pretrained(folder)
    assert run_ranks(2, partial(_refused, folder), timeout_s=60) == [0, 0]


def _refused(folder: Path) -> None:
    model, inputs = zoo.gpt2(layers=2)
    compiled = galvatron_fx.compile(model, init_device_mesh("cpu", (2,)), inputs, plan=MORE_STAGES.plan())
    before = {name: full(parameter).clone() for name, parameter in compiled.named_parameters()}
    try:
        galvatron_fx.load_weights(compiled, folder)
    except galvatron_fx.errors.CheckpointError as error:
        assert "transformer.ln_f.weight has shape [7] there and [32] in the model" in str(error), error
        assert ("rank 1 could not" in str(error)) == (dist.get_rank() == 0), error
    else:
        raise AssertionError("weights of another shape were loaded")
    for name, parameter in compiled.named_parameters():
        assert torch.equal(full(parameter), before[name])


CASES: dict[str, Callable[[Path], None]] = {
    "tied_weights_in_files_to_stages": partial(round_trip, partial(zoo.gpt2, layers=2), STAGES, "40KB"),
    "half_precision_in_one_file_to_stages": partial(
        round_trip, partial(half, partial(zoo.llama, layers=2)), MORE_STAGES, "1GB"
    ),
    "weights_in_files_to_tensor": partial(round_trip, partial(zoo.llama, layers=2), TENSOR, "40KB"),
    "a_wrong_shape_is_refused_on_all_ranks": refused_together,
}
