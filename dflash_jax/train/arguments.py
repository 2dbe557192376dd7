"""How the training scripts take arguments: every one checked, every failure one sentence.

Exit code 0: done; 1: it failed; 2: the command was not right. Importing this imports no jax.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dflash_jax.prompts import UsageError


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not `None` and `False`, which say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Takes long names unabbreviated, since an abbreviation may mean two things tomorrow."""

    def __init__(self, prog: str, doc: str | None) -> None:
        what, _, example = (doc or "").strip().partition("\n\n")
        super().__init__(
            prog=prog,
            description=what,
            epilog=f"example: {example.strip().splitlines()[0]}" if example else None,
            formatter_class=_Help,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def at_least(low: float, kind: type = int) -> Callable[[str], Any]:
    """A number from `low` on, for argparse's `type`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}, wanted {what} from {low:g} on")
        return value

    return read


def names_of(known: Sequence[str], *, may_be_empty: bool = False) -> Callable[[str], list[str]]:
    """Names divided by commas, each one of `known` and there once, for argparse's `type`."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",")] if text.strip() else []
        wrong = [name for name in found if name not in known]
        if wrong or len(set(found)) != len(found) or not (found or may_be_empty):
            raise argparse.ArgumentTypeError(
                f"{text!r}, wanted one or more of {', '.join(known)}, divided by commas"
            )
        return found

    return read


def ids_of(text: str) -> tuple[int, ...]:
    """Whole numbers divided by commas, for argparse's `type`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}, wanted whole numbers divided by commas"
        ) from None


def answer(
    parser: Parser,
    argv: Sequence[str] | None,
    check: Callable[[argparse.Namespace], None],
    work: Callable[[argparse.Namespace], int],
) -> int:
    """Parse, check and work; the exit code, with one sentence on stderr unless it is 0."""
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message, or the help
        return int(stop.code or 0)
    try:
        check(args)
        return work(args)
    except UsageError as error:
        return _say(parser, error, 2)
    except (OSError, RuntimeError, ValueError, ArithmeticError) as error:
        return _say(parser, error, 1)
    except KeyboardInterrupt:
        return _say(parser, "interrupted", 1)


def finish(report: Mapping[str, Any], out: Path | None) -> int:
    """Print a report as the last line of stdout, also write it to `out`; the exit code."""
    line = json.dumps(report)
    if out is not None:
        out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


def _say(parser: Parser, message: object, code: int) -> int:
    """Only the first line: libraries below add pages to theirs."""
    sentence = str(message).strip().split("\n")[0] or type(message).__name__
    print(f"{parser.prog}: {sentence}", file=sys.stderr)
    return code
