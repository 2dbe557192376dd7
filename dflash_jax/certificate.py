"""The proof behind `--check`: drafting changed neither a token nor a bit of its logits.

Both runs use the same executables; plain decoding keeps no draft. A hash covers every logit of the
row behind a token, so equal hashes mean equal bits far beyond the arg max.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_jax.engine import Generation
from dflash_jax.words import counted


@dataclass(frozen=True, slots=True)
class Certificate:
    """Outcome of comparing a drafted with a plain decode."""

    holds: bool
    num_tokens: int  # compared, each with the hash of its logits
    num_sequences: int
    executable: str | None  # fingerprint shared by both runs
    settings: dict[str, Any]
    difference: str | None  # the first one, in words

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        if not self.holds:
            return f"certificate: DIFFERENT: {self.difference} ({where})"
        tokens = counted(self.num_tokens, "token")
        answers = counted(self.num_sequences, "answer")
        return (
            f"certificate: equal: {tokens} ({answers}) and "
            f"the hashes of their logits, drafted and plain, executable {self.executable} ({where})"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_SHOWN = ("device", "jax", "dtype", "batch", "page_size", "capacity", "verify_rows", "impl")


def compare(drafted: Sequence[Generation], plain: Sequence[Generation]) -> Certificate:
    """Compare two certified calls of `generate`, prompt by prompt."""
    settings = drafted[0].stats.settings
    executables = {one.stats.settings["executable"] for one in (*drafted, *plain)}
    differences = [
        found
        for index, pair in enumerate(zip(drafted, plain, strict=True))
        if (found := _difference(index, *pair)) is not None
    ]
    if len(executables) != 1 or None in executables:
        differences.insert(0, "the two runs used different executables")
    return Certificate(
        holds=not differences,
        num_tokens=sum(len(one.ids) for one in plain),
        num_sequences=len(plain),
        executable=executables.pop(),
        settings={name: settings[name] for name in _SHOWN},
        difference=differences[0] if differences else None,
    )


def joined(parts: Sequence[Certificate]) -> Certificate | None:
    """One certificate over several batches; None over none."""
    if not parts:
        return None
    failed = next((part for part in parts if not part.holds), parts[0])
    return Certificate(
        holds=failed.holds,
        num_tokens=sum(part.num_tokens for part in parts),
        num_sequences=sum(part.num_sequences for part in parts),
        executable=failed.executable,
        settings=failed.settings,
        difference=failed.difference,
    )


def _difference(index: int, drafted: Generation, plain: Generation) -> str | None:
    """The first token or hash of a prompt that differs, in words."""
    if drafted.hashes is None or plain.hashes is None:
        raise ValueError("certificate: a generation carries no hashes; decode with certify=True")
    for position, (one, other) in enumerate(zip(drafted.ids, plain.ids, strict=False)):
        if one != other:
            return f"prompt {index}, new token {position}: {one} drafted, {other} plain"
        if drafted.hashes[position] != plain.hashes[position]:
            return f"prompt {index}, new token {position}: token {one} has other logits"
    if len(drafted.ids) != len(plain.ids):
        tokens = counted(len(drafted.ids), "token")
        return f"prompt {index}: {tokens} drafted, {len(plain.ids)} plain"
    if drafted.finish_reason != plain.finish_reason:
        return (
            f"prompt {index}: ends by {drafted.finish_reason} drafted, {plain.finish_reason} plain"
        )
    return None
