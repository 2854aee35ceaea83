"""Power losses while checkpoints are written: what was promised is there, whole, and one line of training."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from galvatron_fx.checkpoint import Checkpointer
from galvatron_fx.checkpoint.steps import Steps
from galvatron_fx.errors import CheckpointError
from tests.checkpoint import disk
from tests.checkpoint.disk import Event, Recorder, Tree


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its number among all that were saved, its step, and the number of the one it goes on from."""

    number: int
    step: int
    after: int


@dataclass
class Run:
    """Training that saves into ``folder``, recorded; ``keep`` and ``every`` as a checkpointer has them."""

    folder: Path
    keep: int | None = None
    every: int | None = None
    all: list[Saved] = field(default_factory=list)
    last: int = -1
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.recorder = Recorder(self.folder)
        self.begin()

    def begin(self) -> None:
        """Start the program, again."""
        self.checkpoints = Checkpointer(self.folder, keep=self.keep, every=self.every)

    def save(self, step: int) -> None:
        saved = Saved(len(self.all), step, self.last)
        self.all.append(saved)
        with self.recorder.recording():
            self.recorder.note(("begun", saved.number))
            self.checkpoints.save(step, model=_model(saved.number), extra={"number": saved.number})
            self.recorder.note(("promised", saved.number))
        self.last = saved.number

    def load(self, step: int) -> None:
        """Start again, from ``step``."""
        self.begin()
        restored = self.checkpoints.load(model=_model(0), step=step)
        assert restored is not None
        self.last = int(restored.extra["number"])

    def check(self, events: list[Event], place: Path, seen: set[bytes]) -> int:
        """Load what is left by every power loss that is not in ``seen``; returns how many. Raises AssertionError."""
        count = 0
        for notes, tree in disk.crashes(events, seen):
            self._check_one(notes, tree, place / "after", is_tenth=count % 10 == 0)
            count += 1
        return count

    def _check_one(self, notes: list[tuple[str, int]], tree: Tree, folder: Path, is_tenth: bool) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        disk.write(tree, folder)
        promised = max((number for what, number in notes if what == "promised"), default=-1)
        begun = max((number for what, number in notes if what == "begun"), default=-1)
        # While a branch is given up, what it began from may be the last.
        allowed = {promised, begun} | ({self.all[begun].after} if begun > promised else set())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                number = self._loaded(folder)
                assert number in allowed, f"loaded save {number} of {self.all}, and {promised} was promised"
                self._check_line(folder, number)
                if is_tenth:
                    self._goes_on(folder)
            except CheckpointError as error:
                raise AssertionError(f"save {promised} was promised: {error}") from error

    def _loaded(self, folder: Path) -> int:
        model = _model(-1)
        restored = Checkpointer(folder).load(model=model)
        if restored is None:
            return -1
        number = int(restored.extra["number"])
        assert int(model.weight.item()) == number and self.all[number].step == restored.step
        return number

    def _check_line(self, folder: Path, number: int) -> None:
        """Every step that a fall-back could take is one that the last was trained through."""
        line = {number}
        while number >= 0:
            number = self.all[number].after
            line.add(number)
        steps = Steps(folder)
        for step in steps.complete():
            record = json.loads((steps.path(step) / "state.json").read_text())
            assert record["extra"]["number"] in line, f"step {step} is of a branch that was given up"

    def _goes_on(self, folder: Path) -> None:
        checkpoints, model = Checkpointer(folder, keep=1), _model(0)
        restored = checkpoints.load(model=model)
        checkpoints.save(1000, model=model)
        again = checkpoints.load(model=model)
        assert again is not None and again.step == 1000, f"after {restored}"
        assert not [path for path in folder.iterdir() if path.name.startswith((".writing", ".removing"))]


def _model(number: int) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, number)
    return model


def branching(folder: Path) -> Run:
    """Three saves of which two are kept, and a branch from the middle."""
    run = Run(folder, keep=2)
    for step in (10, 20, 30):
        run.save(step)
    run.load(step=20)
    run.save(25)
    return run


def drawn(seed: int, folder: Path) -> Run:
    """Saves, and fresh starts from any step that is there, drawn from ``seed``."""
    dice = random.Random(seed)
    run = Run(folder, dice.choice((None, 1, 2, 3)), dice.choice((None, 2, 3)))
    step = 0
    for _ in range(dice.randrange(3, 7)):
        if run.all and dice.random() < 0.3:
            step = dice.choice(Steps(folder).all())
            run.load(step)
        step += dice.randrange(1, 3)
        run.save(step)
    return run


def needless(events: list[Event], check: Callable[[list[Event]], object]) -> list[str]:
    """Places that sync something and could as well not: without them ``check`` raises no AssertionError, either."""
    hollow = []
    for site in disk.sites(events):
        try:
            check(disk.without(events, site))
        except AssertionError:
            continue
        hollow.append(site)
    return hollow
