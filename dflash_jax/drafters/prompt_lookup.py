"""Prompt lookup: what followed the last n-gram the last time it occurred. The floor to beat.

The most recent earlier occurrence wins; without one nothing is proposed.
"""

from typing import cast

import jax
import jax.numpy as jnp

from dflash_jax.config import RuleConfig
from dflash_jax.drafters.proposal import Proposal
from dflash_jax.fixed import Fixed
from dflash_jax.options import DecodeOptions
from dflash_jax.params import Params, RuleParams
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState


def prompt_lookup_drafter(*, num_drafts: int = 7, ngram: int = 3) -> RuleParams:
    """A drafter without weights that copies from the text so far.

    Raises:
      ValueError: fewer than one draft, or an n-gram of no token.
    """
    if num_drafts < 1 or ngram < 1:
        raise ValueError(
            f"prompt lookup: num_drafts is {num_drafts} and ngram {ngram}, wanted both at least 1"
        )
    return RuleParams(None, None, None, RuleConfig("prompt_lookup", num_drafts, ngram=ngram))


def propose(
    params: Params,
    state: DecodeState,
    num_rows: jax.Array,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[Proposal, Buffers, DflashScratch]:
    """Copy what followed the most recent earlier occurrence of the last `ngram` tokens."""
    ngram = cast(RuleParams, params.draft).config.ngram
    tokens, last = state.tokens, state.seq_lens  # tokens[b, last] is the anchor
    ends = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]  # index of an n-gram's last token
    matches = (ends >= ngram - 1) & (ends < last[:, None])  # [B, S]
    for back in range(ngram):
        own = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0)[:, None], axis=1)  # [B, 1]
        matches &= jnp.roll(tokens, back, axis=1) == own
    end = jnp.max(jnp.where(matches, ends, -1), axis=1)  # i32[B]
    found = (end >= 0) & (last >= ngram)
    index = end[:, None] + 1 + jnp.arange(fixed.num_drafts, dtype=jnp.int32)[None]
    drafts = jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)
    known = jnp.where(found, last - end, 0)  # tokens that stand behind the occurrence
    return Proposal(drafts, jnp.minimum(known, num_rows - 1)), buffers, scratch
