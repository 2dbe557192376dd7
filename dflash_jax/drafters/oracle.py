"""Oracle and poison-k: drafts read from the known continuation, the one at k spoiled.

They force an acceptance length: for tests of the loop, and for benchmarks, where `inner` makes a
step cost what the inner drafter costs.
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
    """Propose `params.draft.tokens` behind the anchor, with draft `poison_at` changed."""
    draft = params.draft
    offset = jnp.arange(fixed.num_drafts, dtype=jnp.int32)
    index = state.seq_lens[:, None] + 1 + offset
    index = jnp.clip(index, 0, draft.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(draft.tokens, index, axis=1)
    spoiled = (tokens + 1) % params.target.config.vocab
    tokens = jnp.where(offset == draft.poison_at[:, None], spoiled, tokens)
    return Proposal(tokens, num_rows - 1), buffers, scratch
