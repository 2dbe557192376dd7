"""Greedy generation, plain and speculative, over functions that keep no state.

`tokens` is all there is: the prompt, then what was committed. Its last entry is the anchor, the
one token that the target has not processed yet; it sits at position `len(tokens) - 1`. Every call
of the target recomputes the whole prefix, so nothing can be stale and a rejected draft leaves no
trace.
"""

from dataclasses import dataclass, field

import numpy as np

from tests.reference.layers import argmax_lowest
from tests.reference.verify import accept_greedy, clip


@dataclass
class Step:
    """One propose-verify-commit step."""

    start: int  # position of the anchor
    verify_block_ids: list  # anchor, then drafts
    target_argmax: list  # one a row of the block
    verify_logits: np.ndarray  # [rows, V]
    num_accepted: int  # before stop tokens and the budget
    produced: int  # tokens committed


@dataclass
class Generation:
    """A finished generation."""

    output_ids: list  # prompt and generated tokens
    finish_reason: str  # "stop", "length" (the budget) or "context" (no position left)
    steps: list = field(default_factory=list)


def rows_to_verify(block_rows, remaining, positions_left):
    """Rows of the next step, the anchor's included (spec/verify.md §2.3)."""
    return min(block_rows, remaining + 1, positions_left)


def generate(
    target, prompt, max_new_tokens, *, propose=None, num_drafts=0, tap_ids=(), stop_ids=(),
    max_len=None,
):  # fmt: skip
    """Decode `prompt` greedily with any drafter; without one this is plain decoding.

    Args:
      target: ids[T] -> TargetOutput.
      propose: (tokens, features [len(tokens) - 1, M*E], num_drafts) -> at most that many ids.
      num_drafts: the most drafts a step; a step near the end asks for fewer.
      tap_ids: target layers whose outputs the drafter reads.
      max_len: positions that the cache holds; the sampled token after the last needs none.
    """
    tokens = [int(token) for token in prompt]
    end = len(tokens) + max_new_tokens
    result = Generation(tokens, "length")
    if max_new_tokens == 0:
        return result
    tokens.append(int(argmax_lowest(target(tokens).logits[-1])))
    while (reason := _finished(tokens, end, stop_ids, max_len)) is None:
        anchor_position = len(tokens) - 1
        remaining = end - len(tokens)
        positions_left = remaining + 1 if max_len is None else max_len - anchor_position
        rows = rows_to_verify(num_drafts + 1, remaining, positions_left)
        drafts = []
        if rows > 1 and propose is not None:
            features = target(tokens[:-1]).features(tap_ids) if tap_ids else None
            drafts = [int(token) for token in propose(tokens, features, rows - 1)]
        result.steps.append(_verify(target, tokens, drafts, remaining, stop_ids))
    result.finish_reason = reason
    return result


def _finished(tokens, end, stop_ids, max_len):
    if tokens[-1] in stop_ids:
        return "stop"
    if len(tokens) == end:
        return "length"
    if max_len is not None and len(tokens) > max_len:
        return "context"
    return None


def _verify(target, tokens, drafts, remaining, stop_ids):
    """One pass over the anchor and the drafts; appends what is committed to `tokens`."""
    start = len(tokens) - 1
    logits = target(tokens + drafts).logits[start:]
    best = [int(token) for token in argmax_lowest(logits)]
    verdict = accept_greedy(drafts, best)
    kept = clip(verdict.committed, remaining, stop_ids)
    block = [tokens[-1], *drafts]
    tokens.extend(kept)
    return Step(start, block, best, logits, verdict.num_accepted, len(kept))
