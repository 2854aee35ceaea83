"""Files that the command line names: read once, in bounded size, checked, and never run."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from galvatron_fx.ir.errors import ClusterError, GalvatronError, InputError, PlanError
from galvatron_fx.ir.strict_json import parse_object, read_text

if TYPE_CHECKING:
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.plan.plan import Plan

__all__ = ["CLUSTER", "PLAN", "check_writable", "kind_of", "named", "read_cluster", "read_plan", "refuse"]

PLAN, CLUSTER = "plan", "cluster"

Read = TypeVar("Read")


def read_plan(path: str | Path) -> Plan:
    """Read a plan, with its report if that lies beside it; raises PlanError, InputError for an unreadable file."""
    from galvatron_fx.ir.plan.plan import Plan

    return _read(path, PLAN, Plan.from_json, PlanError).with_report_beside(path)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster or a profile; raises ClusterError, or InputError for a file that cannot be read."""
    from galvatron_fx.ir.cluster.cluster import Cluster

    return _read(path, CLUSTER, Cluster.from_json, ClusterError)


def check_writable(path: str | Path) -> None:
    """Try to write beside ``path`` before anything long begins; raises OSError, which names the path.

    What stands there stays as it is, and so does a path at which nothing stands.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from None
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def kind_of(document: object) -> str:
    """What a document is by its keys: a plan, a cluster, or empty text for neither."""
    keys = document if isinstance(document, dict) else {}
    if "blocks" in keys:
        return PLAN
    return CLUSTER if "device" in keys or "nodes" in keys else ""


@contextmanager
def named(path: str | Path | None) -> Iterator[None]:
    """Have a PlanError that is raised within begin with the path of the plan, if it has one."""
    try:
        yield
    except PlanError as error:
        if path is None:
            raise
        refuse(path, error)


def refuse(path: str | Path, error: GalvatronError) -> NoReturn:
    """Raise an error of the same kind that begins with the path."""
    raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _read(path: str | Path, what: str, parse: Callable[[str], Read], kind: type[GalvatronError]) -> Read:
    text = read_text(path, f"a {what}")
    try:
        return parse(text)
    except kind as error:
        with suppress(InputError):
            other = kind_of(parse_object(text))
            if other and other != what:
                refuse(path, kind(f"this is a {other}, and a {what} is wanted there"))
        refuse(path, error)
