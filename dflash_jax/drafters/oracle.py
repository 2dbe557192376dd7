"""Oracle and poison-k: drafts read from the known continuation, the one at k spoiled.

They force an acceptance length: for tests of the loop, and for benchmarks, where `inner` makes a
step cost what the inner drafter costs.
"""

from typing import cast

import jax
import jax.numpy as jnp

from dflash_jax.config import RuleConfig
from dflash_jax.drafters.proposal import Proposal
from dflash_jax.fixed import Fixed
from dflash_jax.options import DecodeOptions
from dflash_jax.params import DraftParams, MtpParams, Params, RuleParams
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState


def oracle_drafter(
    tokens: jax.Array,
    *,
    num_drafts: int,
    poison_at: jax.Array | int | None = None,
    inner: DraftParams | MtpParams | None = None,
) -> RuleParams:
    """A drafter that knows the continuation.

    Args:
      tokens: i32[B, S] whole sequences, prompt and continuation, indexed by absolute position.
      num_drafts: drafts a step.
      poison_at: i32[B] or one int: the draft to spoil, so that exactly so many are accepted;
        `num_drafts`, the default, spoils none. Data, so that all values share one executable.
      inner: a drafter to run first, for its cost alone.

    Raises:
      ValueError: tokens that are not i32[B, S], no draft, or more than `inner` offers.
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or tokens.dtype != jnp.int32:
        raise ValueError(f"oracle: tokens are {tokens.dtype}{list(tokens.shape)}, wanted i32[B, S]")
    most = num_drafts if inner is None else inner.config.max_drafts
    if not 1 <= num_drafts <= most:
        raise ValueError(f"oracle: num_drafts is {num_drafts}, wanted at least 1, at most {most}")
    k = num_drafts if poison_at is None else poison_at
    return RuleParams(
        tokens=tokens,
        poison_at=jnp.broadcast_to(jnp.asarray(k, jnp.int32), tokens.shape[:1]),
        inner=inner,
        config=RuleConfig("oracle", num_drafts, inner=None if inner is None else inner.config),
    )


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
    """Propose `params.draft.tokens` behind the anchor, with draft `poison_at` changed."""
    draft = cast(RuleParams, params.draft)
    offset = jnp.arange(fixed.num_drafts, dtype=jnp.int32)[None]
    index = state.seq_lens[:, None] + 1 + offset
    index = jnp.clip(index, 0, draft.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(draft.tokens, index, axis=1)
    spoiled = (tokens + 1) % params.target.config.vocab
    tokens = jnp.where(offset == draft.poison_at[:, None], spoiled, tokens)
    return Proposal(tokens, num_rows - 1), buffers, scratch
