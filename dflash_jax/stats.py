"""What a decode did: counts of every cycle, times, and the field's figures with their definitions.

Host side and NumPy only. A `Stats` covers one sequence or many; `Stats.merged` joins them.
Counts are kept per cycle and sequence, so that every figure can be computed again from the object.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_jax.words import counted

LOW_ACCEPTANCE = 1.2  # drafts a cycle; below it a drafter hardly pays for its own pass
LOW_ACCEPTANCE_CYCLES = 50

DEFINITIONS = {
    "tau": "tokens committed a cycle, bonus token included, mean over cycles",
    "draft_acceptance_rate": "drafts accepted / drafts proposed",
    "accepted_per_cycle": "drafts accepted a cycle, bonus token not counted, mean over cycles",
    "tokens_per_second": "tokens after each sequence's first / seconds of decoding, no compile",
    "ttft_seconds": "from the call to a sequence's first token, waiting included, no compile",
    "queue_seconds": "of that, until the device began with the sequence's prompt",
    "rows_per_cycle": "rows a sequence that the target ran a cycle, anchor included, mean",
    "cumulative": "cycles that accepted drafts 1..j / cycles that proposed draft j",
    "conditional": "cycles that accepted drafts 1..j / cycles that proposed j and accepted 1..j-1",
}


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """Counts and times of one or more decoded sequences (S of them).

    A cycle is one propose-verify-commit; the first token comes from prefill and belongs to none.
    """

    drafter: str
    num_drafts: int
    accepted: tuple[np.ndarray, ...]  # S x i32[cycles] drafts committed in each cycle
    committed: tuple[np.ndarray, ...]  # S x i32[cycles] tokens committed, cut at stop and budget
    proposed: tuple[np.ndarray, ...]  # S x i32[cycles] drafts that the target checked
    drafted: tuple[np.ndarray, ...]  # S x i32[cycles, num_drafts] their ids, -1 past `proposed`
    num_tokens: tuple[int, ...]  # S tokens given out, the first one included
    finish_reasons: tuple[str, ...]  # S of "stop", "length", "context"
    prompt_tokens: tuple[int, ...]
    ttft_seconds: tuple[float, ...]  # from the call, compiled, as servers count it from arrival
    decode_seconds: float  # wall time of all cycles; batched sequences share it
    compile_seconds: float = 0.0
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # device, dtype, batch ...: for the record
    queue_seconds: tuple[float, ...] = ()  # part of ttft_seconds before the own prefill began
    widths: tuple[np.ndarray, ...] = ()  # S x i32[cycles] rows a sequence that the target ran

    @property
    def num_cycles(self) -> int:
        return sum(len(counts) for counts in self.accepted)

    @property
    def tau(self) -> float:
        """Mean tokens committed a cycle, bonus token included; NaN before the first cycle."""
        return _mean(self.committed)

    @property
    def accepted_per_cycle(self) -> float:
        """Mean drafts accepted a cycle, bonus token not counted; NaN before the first cycle."""
        return _mean(self.accepted)

    @property
    def draft_acceptance_rate(self) -> float:
        """Drafts accepted / drafts proposed; NaN if none was proposed."""
        proposed = sum(int(counts.sum()) for counts in self.proposed)
        accepted = sum(int(counts.sum()) for counts in self.accepted)
        return accepted / proposed if proposed else float("nan")

    @property
    def rows_per_cycle(self) -> float:
        """Mean rows a sequence that the target ran a cycle; NaN before the first cycle."""
        return _mean(self.widths)

    @property
    def tokens_per_second(self) -> float:
        """Tokens after each sequence's first, over the seconds of decoding; NaN without any."""
        tokens = sum(max(count - 1, 0) for count in self.num_tokens)
        return tokens / self.decode_seconds if self.decode_seconds > 0 and tokens else float("nan")

    def acceptance_by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """Conditional and cumulative acceptance of draft j = 1..num_drafts: two f64[num_drafts].

        cumulative[j]: cycles that accepted drafts 1..j / cycles that proposed draft j.
        conditional[j]: cycles that accepted 1..j / cycles that proposed j and accepted 1..j-1.
        A position that no cycle reached is NaN.
        """
        accepted, proposed = _joined(self.accepted), _joined(self.proposed)
        position = np.arange(1, self.num_drafts + 1)
        reached = accepted[:, None] >= position  # [cycles, num_drafts]
        offered = proposed[:, None] >= position
        before = accepted[:, None] >= position - 1
        hits = reached.sum(axis=0)
        return _ratio(hits, (offered & before).sum(axis=0)), _ratio(hits, offered.sum(axis=0))

    def histogram(self) -> np.ndarray:
        """i64[num_drafts + 1]: how many cycles accepted 0, 1, ... num_drafts drafts."""
        return np.bincount(_joined(self.accepted), minlength=self.num_drafts + 1)

    @property
    def warning(self) -> str | None:
        """One sentence when drafts are hardly ever accepted, else None."""
        if not self.num_drafts or self.num_cycles < LOW_ACCEPTANCE_CYCLES:
            return None
        if self.accepted_per_cycle >= LOW_ACCEPTANCE:
            return None
        mode = self.settings.get("sampling") or {}
        advice = f"is drafter {self.drafter!r} made for this target, and for this chat mode?"
        if mode.get("samples_drafts"):
            advice = f"a text that is drawn is hard to guess, and {advice}"
        elif mode.get("is_random"):
            advice = (
                f"a best token is seldom what is drawn, draft_sampling draws drafts too; {advice}"
            )
        if self.drafter == "prompt_lookup":
            advice = "prompt lookup copies what was said before, and this text repeats little"
        return (
            f"low acceptance: {self.accepted_per_cycle:.2f} drafts accepted a cycle over "
            f"{self.num_cycles} cycles (below {LOW_ACCEPTANCE}); {advice}"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """The table: (name, value, definition) a row, in the order in which they are read."""
        tokens, answers = sum(self.num_tokens), len(self.num_tokens)
        ttft, queue = _mean_of(self.ttft_seconds), _mean_of(self.queue_seconds)
        rows = [
            (
                "tokens",
                f"{tokens} in {counted(answers, 'answer')}",
                "first tokens included",
            ),
            ("finished by", ", ".join(sorted(set(self.finish_reasons))) or "-", ""),
            ("tokens/s", _number(self.tokens_per_second, 1), DEFINITIONS["tokens_per_second"]),
            ("first token", _number(ttft, 3, "s"), DEFINITIONS["ttft_seconds"]),
            ("waiting", _number(queue, 3, "s"), DEFINITIONS["queue_seconds"]),
            ("decoding", _number(self.decode_seconds, 3, "s"), "all cycles"),
            ("compiling", _number(self.compile_seconds, 3, "s"), "not in any other time"),
        ]
        if not self.num_drafts:
            return rows
        if len(self.settings.get("verify_widths", ())) > 1:
            rows.append(
                ("rows verified", _number(self.rows_per_cycle, 2), DEFINITIONS["rows_per_cycle"])
            )
        _, cumulative = self.acceptance_by_position()
        return rows + [
            ("tau", _number(self.tau, 2), DEFINITIONS["tau"]),
            (
                "drafts accepted",
                _number(self.accepted_per_cycle, 2),
                DEFINITIONS["accepted_per_cycle"],
            ),
            (
                "of proposed",
                _number(self.draft_acceptance_rate, 3),
                DEFINITIONS["draft_acceptance_rate"],
            ),
            ("by position", " ".join(_number(x, 2) for x in cumulative), DEFINITIONS["cumulative"]),
            ("histogram", " ".join(map(str, self.histogram())), "cycles that accepted 0, 1, 2 ..."),
        ]

    def title(self) -> str:
        cycles, drafts = counted(self.num_cycles, "cycle"), counted(self.num_drafts, "draft")
        return f"drafter {self.drafter}: {cycles} of up to {drafts}"

    def __str__(self) -> str:
        rows = self.rows()
        name_width = max(len(name) for name, _, _ in rows)
        value_width = max(len(value) for _, value, _ in rows)
        lines = [f"{n:<{name_width}}  {v:<{value_width}}  {d}".rstrip() for n, v, d in rows]
        return "\n".join([self.title(), *lines] + ([self.warning] if self.warning else []))

    def as_dict(self) -> dict[str, Any]:
        """Plain Python values: summary, per-position rates, and the accepted counts of every cycle.

        A figure that is not defined (no cycle, no draft) is None.
        """
        conditional, cumulative = self.acceptance_by_position()
        return {
            "drafter": self.drafter,
            "num_drafts": self.num_drafts,
            "num_cycles": self.num_cycles,
            "num_tokens": list(self.num_tokens),
            "prompt_tokens": list(self.prompt_tokens),
            "finish_reasons": list(self.finish_reasons),
            "tau": _json(self.tau),
            "accepted_per_cycle": _json(self.accepted_per_cycle),
            "draft_acceptance_rate": _json(self.draft_acceptance_rate),
            "acceptance_by_position": {
                "conditional": [_json(x) for x in conditional],
                "cumulative": [_json(x) for x in cumulative],
            },
            "histogram": self.histogram().tolist(),
            "accepted": [counts.tolist() for counts in self.accepted],
            "tokens_per_second": _json(self.tokens_per_second),
            "ttft_seconds": [_json(x) for x in self.ttft_seconds],
            "queue_seconds": [_json(x) for x in self.queue_seconds],
            "rows_per_cycle": _json(self.rows_per_cycle),
            "decode_seconds": _json(self.decode_seconds),
            "compile_seconds": _json(self.compile_seconds),
            "warning": self.warning,
            "settings": self.settings,
            "definitions": DEFINITIONS,
        }

    def to_json(self) -> str:
        """`as_dict` as one line of JSON."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def _repr_html_(self) -> str:
        from dflash_jax.reports import table

        return table.html(self)

    def plot(self):
        """Draw acceptance by position and the histogram: a matplotlib Figure."""
        from dflash_jax.reports import plots

        return plots.acceptance(self)

    @classmethod
    def merged(cls, parts: Sequence["Stats"], *, decode_seconds: float | None = None) -> "Stats":
        """One Stats over the sequences of all parts.

        Args:
          parts: at least one, of the same drafter and num_drafts.
          decode_seconds: wall time of the whole; by default the sum of the parts', right for parts
            that ran one after another, wrong for sequences of one batch.
        """
        if not parts:
            raise ValueError("Stats.merged: no parts given, wanted at least one")
        kinds = {(part.drafter, part.num_drafts) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"Stats.merged: parts of different drafters {sorted(kinds)}")
        joined = {
            name: tuple(item for part in parts for item in getattr(part, name))
            for name in _PER_SEQUENCE
        }
        seconds = sum(part.decode_seconds for part in parts)
        return cls(
            drafter=parts[0].drafter,
            num_drafts=parts[0].num_drafts,
            decode_seconds=seconds if decode_seconds is None else decode_seconds,
            compile_seconds=sum(part.compile_seconds for part in parts),
            settings=parts[0].settings,
            **joined,
        )


_PER_SEQUENCE = (
    "accepted",
    "committed",
    "proposed",
    "drafted",
    "num_tokens",
    "finish_reasons",
    "prompt_tokens",
    "ttft_seconds",
    "queue_seconds",
    "widths",
)


def _joined(counts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *counts]).astype(np.int64)


def _mean(counts: Sequence[np.ndarray]) -> float:
    joined = _joined(counts)
    return float(joined.mean()) if joined.size else float("nan")


def _mean_of(seconds: Sequence[float]) -> float:
    return float(np.mean(seconds)) if seconds else float("nan")


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.where(denominator > 0, numerator / np.maximum(denominator, 1), np.nan)


def _json(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)


def _number(value: float, digits: int, unit: str = "") -> str:
    return "-" if np.isnan(value) else f"{value:.{digits}f}{' ' + unit if unit else ''}"
