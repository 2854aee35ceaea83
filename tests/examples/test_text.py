"""The stream of text goes on from any position, exactly."""

from __future__ import annotations

import copy
import json
import sys
from itertools import islice
from pathlib import Path

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from text import PackedText, Tokens, split

BYTES = Tokens(list, end=0, count=256)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for number, text in enumerate(["one\ntwo\n", "", "a longer line than one sequence\n\nend", "z"]):
        (tmp_path / f"{number}.txt").write_text(text)
    return sorted(tmp_path.iterdir())


def test_every_byte_of_an_epoch_comes_once_with_an_end_between_files(files: list[Path]) -> None:
    stream = PackedText(files, BYTES, length=1, epochs=1)
    got = bytes(int(sample["input_ids"]) for sample in stream)
    assert sorted(got.split(b"\0")) == sorted(file.read_bytes() for file in files)


def test_it_goes_on_from_every_position(files: list[Path]) -> None:
    loader = StatefulDataLoader(PackedText(files, BYTES, length=5, seed=3), batch_size=2)
    batches, states = [], []
    for batch in islice(loader, 12):  # some epochs
        batches.append(batch["input_ids"].tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    for position, state in enumerate(states[:-1]):
        again = StatefulDataLoader(PackedText(copy.copy(files), BYTES, length=5, seed=3), batch_size=2)
        again.load_state_dict(state)
        rest = [batch["input_ids"].tolist() for batch in islice(again, len(batches) - position - 1)]
        assert rest == batches[position + 1 :], position


def test_orders_differ_by_epoch_and_seed(files: list[Path]) -> None:
    streams = [PackedText(files, BYTES, length=1, seed=seed, epochs=2) for seed in range(3)]
    taken = [bytes(int(sample["input_ids"]) for sample in stream) for stream in streams]
    assert len(set(taken)) > 1
    assert any(text[: len(text) // 2] != text[len(text) // 2 :] for text in taken)


def test_some_files_are_held_out_and_none_is_in_both(tmp_path: Path, files: list[Path]) -> None:
    training, held_out = split([tmp_path], "*.txt")
    assert held_out and training and not set(held_out) & set(training)
    assert len(held_out) + len(training) == 3, "the empty file is left out"
    with pytest.raises(SystemExit, match="names 1 files with text"):
        split([files[0]])


def test_the_tokenizer_of_a_pretrained_folder_is_taken(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "one": 1, "two": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(tmp_path)
    tokens = Tokens.of(tmp_path)
    assert (tokens.encode(b"two one three\n"), tokens.end, tokens.count) == ([2, 1, 3], 0, 4)
    assert Tokens.of(tmp_path / "none").encode(b"ab") == [97, 98]
