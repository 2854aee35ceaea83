"""The stream of text goes on from any position, exactly."""

from __future__ import annotations

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
    assert sorted(got.removesuffix(b"\0").split(b"\0")) == sorted(file.read_bytes() for file in files)


@pytest.mark.parametrize("of", [1, 3, 8])
def test_the_rows_of_a_batch_share_out_an_epoch(files: list[Path], of: int) -> None:
    parts = []
    for row in range(of):
        stream = PackedText(files, BYTES, length=1, epochs=1, rows=[row], of=of)
        parts.append(bytes(int(sample["input_ids"]) for sample in stream))
    whole = bytes(int(sample["input_ids"]) for sample in PackedText(files, BYTES, length=1, epochs=1))
    assert b"".join(parts) == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_row_is_the_same_whoever_reads_it_and_goes_on_with_other_rows(files: list[Path]) -> None:
    def taken(stream: PackedText, count: int) -> list[list[int]]:
        return [sample["input_ids"].tolist() for sample in islice(stream, count)]

    whole = PackedText(files, BYTES, length=5, seed=1, rows=range(4), of=4)
    first, state, rest = taken(whole, 4 * 6), whole.state_dict(), taken(whole, 4 * 6)
    for rows in ([0], [1, 3], [2, 0]):
        part = PackedText(files, BYTES, length=5, seed=1, rows=rows, of=4)
        assert taken(part, len(rows) * 6) == [first[step * 4 + row] for step in range(6) for row in rows]
        part.load_state_dict(state)
        assert taken(part, len(rows) * 6) == [rest[step * 4 + row] for step in range(6) for row in rows]


def test_other_batches_and_too_little_text_are_refused(files: list[Path]) -> None:
    state = PackedText(files, BYTES, length=5, rows=range(4), of=4).state_dict()
    with pytest.raises(ValueError, match="in batches of 4, not 2"):
        PackedText(files, BYTES, length=5, rows=[0], of=2).load_state_dict(state)
    with pytest.raises(SystemExit, match="give more"):
        PackedText(files, BYTES, length=5, rows=[0], of=1000)


def test_it_goes_on_from_every_position(files: list[Path]) -> None:
    loader = StatefulDataLoader(PackedText(files, BYTES, length=5, seed=3), batch_size=2)
    batches, states = [], []
    for batch in islice(loader, 12):  # some epochs
        batches.append(batch["input_ids"].tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    for position, state in enumerate(states[:-1]):
        again = StatefulDataLoader(PackedText(files, BYTES, length=5, seed=3), batch_size=2)
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
