"""What `dflash decode` writes: text or JSON lines, tables to stderr, figures as the last line."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_jax.certificate import Certificate
from dflash_jax.engine import Generation, summary
from dflash_jax.fixed import Fixed
from dflash_jax.reports.progress import Phases
from dflash_jax.sampling import SamplingOptions
from dflash_jax.stats import Stats


class Output:
    """Streams one prompt's text, or writes a JSON line for each prompt of a file."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        has_text: bool,
        sampling: Sequence[SamplingOptions] = (),
    ) -> None:
        """`sampling`: what was asked of each answer, where that is not one and the same."""
        self._args = args
        self._sampling = sampling
        self._phases = Phases()
        self._is_file = args.prompts is not None
        self._streams = not self._is_file and not args.json and has_text
        self._is_mid_line = False  # stdout ends in text without its newline

    def callbacks(self, *, first: int) -> dict[str, Any]:
        """For `generate`, whose prompt 0 is request `first`."""
        shown: dict[str, Any] = {"progress": self._phases}
        if self._streams:
            shown["on_text"] = self._write_text
        if self._is_file:
            shown["on_finish"] = lambda index, one: self._write_line(first + index, one)
        return shown

    def say(self, words: str) -> None:
        self.close()
        self._end_line()
        print(words, file=sys.stderr)

    def _end_line(self) -> None:
        if self._is_mid_line:
            print(flush=True)
        self._is_mid_line = False

    def close(self) -> None:
        """Take a spinner away."""
        self._phases.stop()

    def _write_text(self, index: int, piece: str) -> None:
        self.close()
        print(piece, end="", flush=True)
        self._is_mid_line = True

    def _write_line(self, index: int, one: Generation) -> None:
        if not self._args.json:
            self.close()
            print(json.dumps(self._line(index, one)), flush=True)
        self._phases(f"prompt {index + 1} of {len(self._args.requests)} is done")

    def _line(self, index: int, one: Generation) -> dict[str, Any]:
        line = {"index": index, "id": self._args.requests[index].id, **_answer(one)}
        return line | ({"sampling": asdict(self._sampling[index])} if self._sampling else {})

    def _answers(self, found: list[Generation]) -> dict[str, Any]:
        """What the last line says of the answers: those that no line before it holds."""
        if not self._is_file:
            return _answer(found[0])
        lines = [self._line(index, one) for index, one in enumerate(found)]
        return {"prompts": len(found), **({"answers": lines} if self._args.json else {})}

    def finish(self, found: list[Generation], proof: Certificate | None, facts: dict[str, Any]):
        """End the text, print table and certificate, then the last line: all figures."""
        self.close()
        stats = summary(found)
        self._end_line()
        if not self._is_file and not self._args.json and not self._streams:
            print(",".join(map(str, found[0].ids)))
        if self._args.stats:
            _print_table(stats)
        elif stats.warning:
            self.say(stats.warning)
        if proof is not None:
            self.say(str(proof))
        record = {
            **facts,
            **self._answers(found),
            "stats": stats.as_dict(),
            "certificate": None if proof is None else proof.as_dict(),
        }
        print(json.dumps(record), flush=True)


def sizes(fixed: Fixed) -> dict[str, Any]:
    """A plan in plain values."""
    return {
        "batch": fixed.batch,
        "capacity": fixed.capacity,
        "page_size": fixed.page_size,
        "num_pages": fixed.num_pages,
        "num_drafts": fixed.num_drafts,
        "verify_rows": fixed.verify_rows,
        "dtype": fixed.hidden.dtype,
    }


def _answer(one: Generation) -> dict[str, Any]:
    """An answer in plain values; what was not asked for has no entry."""
    answer = {"text": one.text, "ids": list(one.ids), "finish_reason": one.finish_reason}
    asked = {"seed": one.seed, "logprobs": one.logprobs, "stop_string": one.stop_string}
    return answer | {name: value for name, value in asked.items() if value is not None}


def _print_table(stats: Stats) -> None:
    from rich.console import Console

    from dflash_jax.reports import table

    Console(stderr=True).print(table.build(stats))
