"""Prompt lookup: what followed the last n-gram the last time it occurred. The floor to beat.

The most recent earlier occurrence wins; without one nothing is proposed.
"""

import jax
import jax.numpy as jnp

from dflash_jax.drafters.proposal import Proposal
from dflash_jax.fixed import Fixed
from dflash_jax.params import Params
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState


def propose(
    params: Params,
    state: DecodeState,
    num_rows: jax.Array,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    impl: str = "auto",
) -> tuple[Proposal, Buffers, DflashScratch]:
    """Copy what followed the most recent earlier occurrence of the last `ngram` tokens."""
    ngram = params.draft.config.ngram
    tokens, last = state.tokens, state.seq_lens  # tokens[b, last] is the anchor
    ends = jnp.arange(tokens.shape[1], dtype=jnp.int32)  # candidate index of an n-gram's last token
    matches = (ends >= ngram - 1) & (ends < last[:, None])  # [B, S]
    for back in range(ngram):
        own = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], axis=1)  # [B, 1]
        matches &= jnp.roll(tokens, back, axis=1) == own
    end = jnp.max(jnp.where(matches, ends, -1), axis=1)  # i32[B]
    found = (end >= 0) & (last >= ngram)
    index = end[:, None] + 1 + jnp.arange(fixed.num_drafts, dtype=jnp.int32)
    drafts = jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)
    known = jnp.where(found, last - end, 0)  # tokens that stand behind the occurrence
    return Proposal(drafts, jnp.minimum(known, num_rows - 1)), buffers, scratch
