"""Text files as an endless stream of token sequences that knows where it is, so that a run goes on where it stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

LONGEST_LINE = 65_536  # bytes read at once: a longer line comes in pieces
HELD_OUT = 20  # of so many files, one is not trained on


@dataclass(frozen=True)
class Tokens:
    """``encode`` makes tokens below ``count`` of a line, ``end`` stands between files."""

    encode: Callable[[bytes], list[int]]
    end: int
    count: int

    @classmethod
    def of(cls, model: Path) -> Tokens:
        """The tokenizer in a pretrained folder; else the bytes themselves, with byte 0 between files."""
        if not (model / "tokenizer.json").is_file():
            return cls(list, end=0, count=256)
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        end = tokenizer.eos_token_id

        def encode(line: bytes) -> list[int]:
            return list(tokenizer.encode(line.decode(errors="replace"), add_special_tokens=False))

        return cls(encode, 0 if end is None else end, len(tokenizer))


class PackedText(IterableDataset[dict[str, Tensor]]):
    """Sequences of ``length`` tokens, files one behind the other, in another order every epoch, drawn from ``seed``.

    Yields ``input_ids`` and ``labels``, both int64 [length] and equal: causal models of transformers shift by
    themselves. ``epochs``: how many times through the files; None for no end. Its state is a position, not a count of
    samples to skip: going on takes no longer late in a run than early.
    """

    def __init__(
        self, files: Sequence[Path], tokens: Tokens, length: int, seed: int = 0, epochs: int | None = None
    ) -> None:
        self.files, self.tokens, self.length, self.seed, self.epochs = files, tokens, length, seed, epochs
        self.load_state_dict({"epoch": 0, "file": 0, "offset": 0, "rest": []})

    def state_dict(self) -> dict[str, Any]:
        """What is next: epoch, file in its order, byte in the file; and ``rest``, tokens read but not given out."""
        return {"epoch": self.epoch, "file": self.file, "offset": self.offset, "rest": list(self.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.epoch, self.file, self.offset, self.rest = (state[key] for key in ("epoch", "file", "offset", "rest"))
        self.rest = list(self.rest)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield from where the state says."""
        while self.epochs is None or self.epoch < self.epochs:
            order = random.Random(f"{self.seed} {self.epoch}").sample(self.files, len(self.files))
            while self.file < len(order):
                yield from self._of_file(order[self.file])
                self.file, self.offset = self.file + 1, 0
            self.epoch, self.file = self.epoch + 1, 0

    def _of_file(self, path: Path) -> Iterator[dict[str, Tensor]]:
        with path.open("rb") as file:
            file.seek(self.offset)
            yield from self._sequences()
            while line := file.readline(LONGEST_LINE):
                self.offset = file.tell()
                self.rest += self.tokens.encode(line)
                yield from self._sequences()
        self.rest.append(self.tokens.end)

    def _sequences(self) -> Iterator[dict[str, Tensor]]:
        while len(self.rest) >= self.length:
            ids = torch.tensor(self.rest[: self.length])
            del self.rest[: self.length]
            yield {"input_ids": ids, "labels": ids}


def split(paths: Sequence[Path], pattern: str = "*") -> tuple[list[Path], list[Path]]:
    """(files to train on, files held out) of files and folders: of every HELD_OUT files one, at least one, is held out.

    Raises SystemExit where there are fewer than two files.
    """
    files = sorted(file for path in paths for file in (path.rglob(pattern) if path.is_dir() else [path]))
    files = [file for file in files if file.is_file() and file.stat().st_size]
    if len(files) < 2:
        raise SystemExit(f"--text names {len(files)} files with text in them: give two at least, one is held out")
    return [file for number, file in enumerate(files) if number % HELD_OUT], files[::HELD_OUT]
