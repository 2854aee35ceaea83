"""A disk that loses what was not synced: what a folder may look like after a power loss at any moment of writing it.

A recorder notes, in order, what happens to a folder: entries that change in its directories, contents of its files, and
fsyncs. From any prefix of that record it makes the states that a file system may be left in, as ALICE (Pillai et al.,
OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018) do: contents are sure once the file was synced, entries once their
directory was; what is not sure is lost, kept, or kept in part, in any order.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_ROOT = 0
Tree = Mapping[str, "Tree | bytes"]
"""A directory: its entries by name, each a directory or the contents of a file."""


@dataclass(frozen=True)
class Entries:
    """One change of a directory, all of it or nothing: names and what they now stand for, None for nothing."""

    directory: int
    names: Mapping[str, int | None]


@dataclass(frozen=True)
class Contents:
    """What a file holds from now on."""

    file: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """A file or directory was synced by ``site``, a place in the program."""

    node: int
    site: str


@dataclass(frozen=True)
class Note:
    """What the program has said by then."""

    what: Any


Event = Entries | Contents | Sync | Note


@dataclass
class Recorder:
    """Notes what happens to ``folder`` inside :meth:`recording`."""

    folder: Path
    events: list[Event] = field(default_factory=list)
    _nodes: dict[int, int] = field(default_factory=dict)
    _directories: dict[int, dict[str, int]] = field(default_factory=lambda: {_ROOT: {}})
    _contents: dict[int, bytes] = field(default_factory=dict)
    _count: int = _ROOT
    _busy: bool = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Listen to this process; saves beside training are not for it."""
        real_fsync = os.fsync

        def fsync(descriptor: int) -> None:
            real_fsync(descriptor)
            self.look()
            node = self._nodes.get(os.fstat(descriptor).st_ino)
            if node is not None:
                self.events.append(Sync(node, _site()))

        _listen()
        _HEARING.append(self)
        self._nodes[self.folder.stat().st_ino] = _ROOT
        try:
            with mock.patch.object(os, "fsync", fsync):
                yield
        finally:
            _HEARING.remove(self)

    def note(self, what: Any) -> None:
        """Write down what the program says at this moment."""
        self.look()
        self.events.append(Note(what))

    def look(self) -> None:
        """Note how the folder differs from when it was last looked at."""
        if self._busy:
            return
        self._busy = True
        try:
            self._scan(self.folder, _ROOT)
        finally:
            self._busy = False

    def _scan(self, folder: Path, node: int) -> None:
        entries = {entry.name: entry for entry in os.scandir(folder)}
        now = {name: self._node(entry, self._directories[node].get(name)) for name, entry in sorted(entries.items())}
        before = self._directories[node]
        names = {name: now.get(name) for name in sorted({*before, *now}) if before.get(name) != now.get(name)}
        if names:
            self.events.append(Entries(node, names))
            self._directories[node] = now
        for name, entry in entries.items():
            if entry.is_dir(follow_symlinks=False):
                self._scan(folder / name, now[name])
            elif (data := (folder / name).read_bytes()) != self._contents.get(now[name], b""):
                self.events.append(Contents(now[name], data))
                self._contents[now[name]] = data

    def _node(self, entry: os.DirEntry[str], before: int | None) -> int:
        """The number of what an entry stands for; a file system gives the inode of what was removed to another."""
        inode = entry.inode()
        known = self._nodes.get(inode)
        is_known = known is not None and any(known in names.values() for names in self._directories.values())
        if known is None or not (is_known or known == before):
            self._count += 1
            known = self._nodes[inode] = self._count
            if entry.is_dir(follow_symlinks=False):
                self._directories[known] = {}
        return known


_HEARING: list[Recorder] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Before each call that changes a directory, see what the call before it did."""
    opens = event == "open" and bool((arguments[2] or 0) & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
    if _HEARING and (opens or event in _CHANGES):
        _HEARING[-1].look()


def _listen() -> None:
    if not _listening:
        _listening.append(True)
        sys.addaudithook(_hear)


_listening: list[bool] = []


def _site() -> str:
    """Who called fsync, and who called that."""
    frame = sys._getframe(2)
    places = []
    for _ in range(2):
        places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        assert frame.f_back is not None
        frame = frame.f_back
    return " < ".join(places)


def sites(events: Collection[Event]) -> list[str]:
    """The places that sync something."""
    return sorted({event.site for event in events if isinstance(event, Sync)})


def without(events: Collection[Event], site: str) -> list[Event]:
    """What would have been recorded had ``site`` not synced."""
    return [event for event in events if not (isinstance(event, Sync) and event.site == site)]


def crashes(events: list[Event], seen: set[bytes]) -> Iterator[tuple[list[Any], Tree]]:
    """Every state after a power loss at any moment, with what the program had said by then, that is not in ``seen``."""
    notes: list[Any] = []
    for length in range(1, len(events) + 1):
        last = events[length - 1]
        if isinstance(last, Note):
            notes = [*notes, last.what]
        for tree in _states(events[:length]):
            key = hashlib.sha256(repr((notes, tree)).encode()).digest()
            if key not in seen:
                seen.add(key)
                yield notes, tree


def _states(events: list[Event]) -> Iterator[Tree]:
    """What may be left of ``events``: all or no pending contents, or half, and pending entries all, none, or one."""
    synced = {event.node: index for index, event in enumerate(events) if isinstance(event, Sync)}
    pending = [
        index for index, event in enumerate(events)
        if isinstance(event, Entries) and index > synced.get(event.directory, -1)
    ]  # fmt: skip
    lost: list[Collection[int]] = [(), pending, *([index] for index in pending)]
    lost += [[other for other in pending if other != index] for index in pending]
    for keep in (_nothing, _half, _everything):
        for gone in lost:
            yield _tree(events, synced, frozenset(gone), keep)


Keep = Callable[[bytes, bytes], bytes]


def _nothing(sure: bytes, _: bytes) -> bytes:
    return sure


def _half(_: bytes, pending: bytes) -> bytes:
    return pending[: len(pending) // 2]


def _everything(_: bytes, pending: bytes) -> bytes:
    return pending


def _tree(events: list[Event], synced: Mapping[int, int], gone: Collection[int], keep: Keep) -> Tree:
    directories: dict[int, dict[str, int]] = {}
    contents: dict[int, bytes] = {}
    for index, event in enumerate(events):
        if isinstance(event, Contents):
            is_sure = index < synced.get(event.file, -1)
            contents[event.file] = event.data if is_sure else keep(contents.get(event.file, b""), event.data)
        elif isinstance(event, Entries) and index not in gone:
            entries = directories.setdefault(event.directory, {})
            for name, node in event.names.items():
                entries.pop(name, None)
                if node is not None:
                    entries[name] = node
    folders = {node for event in events if isinstance(event, Entries) for node in [event.directory]}

    def grown(node: int) -> Tree:
        return {
            name: grown(inner) if inner in folders else contents.get(inner, b"")
            for name, inner in sorted(directories.get(node, {}).items())
        }

    return grown(_ROOT)


def write(tree: Tree, folder: Path) -> None:
    """Make a folder that looks so."""
    folder.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (folder / name).write_bytes(inner)
        else:
            write(inner, folder / name)
