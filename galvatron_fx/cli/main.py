"""``galvatron-fx``: read the command line, run a subcommand, and say in one message and one number how it ended."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

from galvatron_fx._version import __version__
from galvatron_fx.cli import check, diff, estimate, explain, plan, profile, schema, serve_plan, sweep, validate
from galvatron_fx.cli.exits import BUG, EXIT_CODES, PIPE, UsageError, exit_code
from galvatron_fx.cli.output import SILENT, Result
from galvatron_fx.ir.plan.budget_error import BudgetError

__all__ = ["main"]

_COMMANDS = {
    "plan": plan,
    "sweep": sweep,
    "serve-plan": serve_plan,
    "estimate": estimate,
    "explain": explain,
    "check": check,
    "diff": diff,
    "validate": validate,
    "profile": profile,
    "schema": schema,
}
_JSON = "--json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``galvatron-fx`` with ``arguments`` (default: of the process) and return its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    debug = "--debug" in given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # tables have characters that not every terminal has
    try:
        with _short_warnings():
            options = _parser().parse_args(given)
            result: Result = options.run(options)
        _show(result, _JSON in given)
        return result.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        return PIPE
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return _report(error, _JSON in given)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours, and name the help of the subcommand."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = re.findall(r"--[\w-]+", self.format_usage()) if unknown[0].startswith("--") else []
            near = get_close_matches(unknown[0], flags, n=1)
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; did you mean {n}?" for n in near))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
    parser = _Parser(
        prog="galvatron-fx",
        description="Plan the parallel training of a PyTorch model: on a laptop, for a cluster that is not there.",
        epilog=f"exit codes:\n{codes}\n\nBegin with: galvatron-fx plan --model llama --cluster 64xA100-80GB",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"galvatron-fx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, command in _COMMANDS.items():
        command_parser = commands.add_parser(
            name,
            help=command.HELP,
            description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add(command_parser)
        command_parser.add_argument(
            _JSON, action="store_true", help="print JSON, also for errors, and nothing else, on stdout"
        )
        command_parser.add_argument("--debug", action="store_true", help="print the traceback of an error, too")
        command_parser.set_defaults(run=command.run)
    return parser


def _show(result: Result, as_json: bool) -> None:
    if result is not SILENT:
        print(json.dumps(result.document, allow_nan=False) if as_json else result.text, flush=True)


def _report(error: BaseException, as_json: bool) -> int:
    """Say what went wrong: in words on stderr, or as JSON on stdout."""
    code = exit_code(error)
    message = _printable(_message(error, code))
    if not as_json:
        print(f"galvatron-fx: {message}", file=sys.stderr, flush=True)
        return code
    document: dict[str, Any] = {"kind": type(error).__name__, "message": message, "exit_code": code}
    if isinstance(error, BudgetError):
        document["least_bytes"] = error.least_bytes
        document["plan"] = json.loads(error.plan.to_json()) if error.plan is not None else None
    print(json.dumps({"error": document}), flush=True)
    return code


def _message(error: BaseException, code: int) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    if code == BUG:
        return f"this is a bug: {type(error).__name__}: {error}; please report it with what --debug prints"
    return str(error)


def _printable(text: str) -> str:
    """Text that may hold what stood in a file, without what a terminal would take for commands."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Warnings in a line each, without the code that raised them."""
    with warnings.catch_warnings():

        def show(message: Warning | str, *_: Any) -> None:
            print(f"galvatron-fx: note: {message}", file=sys.stderr, flush=True)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


if __name__ == "__main__":
    sys.exit(main())
