"""Acceptance without an engine: drafts at every answer position at once, then the walk over them.

The text is the target's own greedy answer, so a draft is accepted exactly if it equals the text.
With drafts known at every position, the cycles of a decode are a walk on the host, and the result
is the loop's acceptance length up to the last bits of its logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.params import TargetParams
from dflash_jax.train.dense import Tensors, causal_attention, target_forward
from dflash_jax.train.kinds import Seen, Trainable, drafts_of, taps_of


@partial(jax.jit, static_argnames=("configs", "num_anchors", "attention", "chunk"))
def accepted_counts(
    target: TargetParams,
    tensors: Mapping[str, Tensors],
    tokens: jax.Array,
    *,
    configs: tuple[tuple[str, Trainable], ...],
    num_anchors: int,
    attention: str,
    chunk: int,
) -> dict[str, jax.Array]:
    """Drafts that equal the text after each position, a drafter: i32[B, T].

    Args:
      tensors: weights for unscaled features, of each drafter.
      tokens: i32[B, T], T a multiple of `num_anchors`; that many positions go through at once.
    """
    batch, length = tokens.shape
    taps = taps_of([config for _, config in configs])
    seen = Seen(tokens, *target_forward(target, tokens, taps, causal_attention(attention)))
    cast = jax.tree.map(lambda x: x.astype(target.embed.dtype), tensors)
    counts = {}
    for name, config in configs:
        ahead = jnp.arange(1, config.max_drafts + 1)

        def some(start, name=name, config=config, ahead=ahead):
            anchors = jnp.broadcast_to(start + jnp.arange(num_anchors), (batch, num_anchors))
            drafts = drafts_of(cast[name], config, target, seen, anchors, chunk)
            at = jnp.minimum(anchors[..., None] + ahead, length - 1)
            text = jnp.take_along_axis(tokens, at.reshape(batch, -1), axis=1).reshape(at.shape)
            return jnp.cumprod((drafts == text).astype(jnp.int32), axis=-1).sum(-1)

        found = jax.lax.map(some, jnp.arange(0, length, num_anchors))  # [T/A, B, A]
        counts[name] = jnp.moveaxis(found, 0, 1).reshape(batch, length)
    return counts


def walk(accepted: np.ndarray, start: int, stop: int) -> list[int]:
    """Tokens committed in each cycle of a decode whose first token is at `start`.

    Args:
      accepted: i32[T] drafts that would be accepted after each position.
      stop: position of the last token of the answer.
    """
    at, cycles = start, []
    while at < stop:
        committed = min(int(accepted[at]) + 1, stop - at)
        cycles.append(committed)
        at += committed
    return cycles


def acceptance_length(
    accepted: np.ndarray, is_answer: np.ndarray, max_new_tokens: int
) -> tuple[float, int]:
    """τ (mean tokens a cycle, bonus included) over each row's first answer, and the cycles."""
    cycles: list[int] = []
    for counts, written in zip(accepted, is_answer, strict=True):
        where = np.flatnonzero(written)
        if not len(where):
            continue
        start = int(where[0])
        gaps = np.flatnonzero(~written[start:])
        end = start + (int(gaps[0]) if len(gaps) else len(written) - start) - 1
        cycles += walk(counts, start, min(end, start + max_new_tokens - 1))
    return (float(np.mean(cycles)) if cycles else float("nan")), len(cycles)


def measure(
    target: TargetParams,
    tensors: Mapping[str, Tensors],
    configs: Mapping[str, Trainable],
    tokens: np.ndarray,
    is_answer: np.ndarray,
    groups: Sequence[str],
    *,
    batch: int = 32,
    num_anchors: int = 64,
    attention: str = "xla",
    chunk: int = 8192,
    max_new_tokens: int = 128,
) -> dict[str, dict[str, float]]:
    """τ of each drafter on each group of rows: `{drafter: {group: τ}}`.

    Args:
      groups: a name a row, such as its style or evaluation set.
    """
    rows = len(tokens)
    padded = np.concatenate([tokens, np.repeat(tokens[-1:], -rows % batch, axis=0)])
    found: dict[str, list[np.ndarray]] = {name: [] for name in configs}
    for at in range(0, len(padded), batch):
        counts = accepted_counts(
            target, dict(tensors), jnp.asarray(padded[at : at + batch]),
            configs=tuple(configs.items()), num_anchors=num_anchors, attention=attention,
            chunk=chunk,
        )  # fmt: skip
        for name, one in counts.items():
            found[name].append(np.asarray(one))
    result: dict[str, dict[str, float]] = {}
    labels = np.asarray(groups)
    for name, parts in found.items():
        accepted = np.concatenate(parts)[:rows]
        result[name] = {
            group: round(
                acceptance_length(
                    accepted[labels == group], is_answer[labels == group], max_new_tokens
                )[0],
                4,
            )
            for group in sorted(set(groups))
        }
    return result
