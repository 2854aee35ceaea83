"""Text files as an endless stream of token sequences that knows where it is, so that a run goes on where it stopped."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


@dataclass
class Place:
    """Where a row goes on: ``at`` counts the bytes and the ends of files before it in the order of its ``epoch``;
    ``rest`` are tokens read but not given out."""

    epoch: int
    at: int
    rest: list[int]


class PackedText(IterableDataset[dict[str, Tensor]]):
    """Sequences of ``length`` tokens for some ``rows`` of a batch of ``of`` rows: one for each of them in turn.

    Files lie one behind the other, in another order every epoch, drawn from ``seed``. Each row of the batch reads its
    own part of them, ``1 / of`` of all bytes, so that what a row holds does not depend on who reads the others.

    Yields ``input_ids`` and ``labels``, both int64 [length] and equal: causal models of transformers shift by
    themselves. ``epochs``: how many times through the files; None for no end. Its state is a position, not a count of
    samples to skip: going on takes no longer late in a run than early. Raises SystemExit where there is less text than
    there are rows.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokens: Tokens,
        length: int,
        seed: int = 0,
        epochs: int | None = None,
        rows: Sequence[int] = (0,),
        of: int = 1,
    ) -> None:
        self.files, self.tokens, self.length, self.seed, self.epochs = files, tokens, length, seed, epochs
        self.sizes = {file: file.stat().st_size + 1 for file in files}  # bytes, and an end
        self.bounds = [sum(self.sizes.values()) * row // of for row in range(of + 1)]
        if self.bounds[-1] < of:
            raise SystemExit(f"--text holds {self.bounds[-1]} bytes for a batch of {of}: give more")
        self.places = {row: Place(0, self.bounds[row], []) for row in rows}

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position and rest of every row of the batch, also of those read by other ranks: all call it alike."""
        every: list[Any] = [{row: astuple(place) for row, place in self.places.items()}]
        if dist.is_initialized():
            every = every * dist.get_world_size()
            dist.all_gather_object(every, every[0])
        known = {row: list(place) for places in every for row, place in places.items()}
        return {"rows": [known[row] for row in sorted(known)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises ValueError for one of a batch of another size."""
        if len(state["rows"]) != len(self.bounds) - 1:
            raise ValueError(f"the text was read in batches of {len(state['rows'])}, not {len(self.bounds) - 1}")
        for row in self.places:
            epoch, at, rest = state["rows"][row]
            self.places[row] = Place(epoch, at, list(rest))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield from where the state says."""
        streams = [self._row(row) for row in self.places]
        while all(samples := [next(stream, None) for stream in streams]):
            yield from filter(None, samples)

    def _row(self, row: int) -> Iterator[dict[str, Tensor]]:
        place, first, last = self.places[row], *self.bounds[row : row + 2]
        yield from self._sequences(place)
        while self.epochs is None or place.epoch < self.epochs:
            order = random.Random(f"{self.seed} {place.epoch}").sample(self.files, len(self.files))
            starts = [0, *accumulate(self.sizes[file] for file in order)]
            while place.at < last:
                number = bisect_right(starts, place.at) - 1
                yield from self._of_file(order[number], starts[number], place, last)
            place.epoch, place.at = place.epoch + 1, first

    def _of_file(self, path: Path, start: int, place: Place, last: int) -> Iterator[dict[str, Tensor]]:
        """The rest of a file that starts at ``start``, up to ``last``, and its end."""
        end = start + self.sizes[path] - 1
        with path.open("rb") as file:
            file.seek(place.at - start)
            while (wanted := min(LONGEST_LINE, end - place.at, last - place.at)) > 0:
                line = file.readline(wanted)
                place.at = place.at + len(line) if line else end  # it was longer when the run began
                place.rest += self.tokens.encode(line)
                yield from self._sequences(place)
        if place.at < last:
            place.at += 1
            place.rest.append(self.tokens.end)
            yield from self._sequences(place)

    def _sequences(self, place: Place) -> Iterator[dict[str, Tensor]]:
        while len(place.rest) >= self.length:
            ids = torch.tensor(place.rest[: self.length])
            del place.rest[: self.length]
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
