"""Commit: advance the sequences past the tokens the target agreed to, and the drafter's context."""

import jax
import jax.numpy as jnp

from dflash_jax import drafters
from dflash_jax.drafters.proposal import CommittedRows
from dflash_jax.fixed import Fixed
from dflash_jax.gdn_state import keep_rows
from dflash_jax.metadata import slots_at
from dflash_jax.params import Params
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState
from dflash_jax.verify import Verification


def commit(
    params: Params,
    verification: Verification,
    state: DecodeState,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    impl: str = "auto",
) -> tuple[DecodeState, Buffers, DflashScratch]:
    """Keep the committed tokens; K/V of rejected rows is left behind, beyond every length.

    Nor does their effect on a recurrent state have to be undone: `gdn_state` says why.

    Rows 0..num_committed-1 of the block become context of the drafter: the anchor and the accepted
    drafts, whose target features exist. The bonus token has none yet; it is the next anchor.
    """
    count = verification.num_committed
    offset = jnp.arange(fixed.verify_rows, dtype=jnp.int32)[None]
    is_new = offset < count[:, None]  # [B, R]
    positions = state.seq_lens[:, None] + offset
    slots = jnp.where(is_new, slots_at(buffers.meta.block_table, positions, fixed.page_size), -1)
    rows = CommittedRows(
        verification.tokens.reshape(-1),
        verification.committed.reshape(-1),
        verification.features,
        verification.hidden,
        positions.reshape(-1),
        slots.reshape(-1),
        jnp.repeat(jnp.arange(fixed.batch, dtype=jnp.int32), fixed.verify_rows),
    )
    buffers, scratch = drafters.get(params.draft).advance(
        params, rows, buffers, scratch, fixed=fixed, impl=impl
    )
    gdn = keep_rows(buffers.gdn, buffers.verify_wy_tables, verification.num_rows, count)
    buffers = buffers.replace(gdn=gdn)
    last = jnp.maximum(count - 1, 0)[:, None]
    anchor = jnp.take_along_axis(verification.committed, last, axis=1)[:, 0]
    state = state.replace(
        tokens=write_tokens(state.tokens, verification.committed, positions + 1, is_new),
        seq_lens=state.seq_lens + count,
        anchor=jnp.where(count > 0, anchor, state.anchor),
        remaining=state.remaining - count,
        status=verification.status,
        num_steps=state.num_steps + 1,
        sampling=None
        if state.sampling is None
        else state.sampling.after(verification.committed, is_new),
    )
    return state, buffers, scratch


def write_tokens(
    history: jax.Array, tokens: jax.Array, positions: jax.Array, is_real: jax.Array
) -> jax.Array:
    """Write tokens[B, R] at positions[B, R] of history[B, S + 1]; unreal ones are dropped."""
    width = history.shape[1]
    sequence = jnp.arange(history.shape[0], dtype=jnp.int32)[:, None]
    # Distinct out-of-range columns keep the indices unique, as the scatter is promised.
    beyond = width + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    column = jnp.where(is_real, positions, beyond)
    return history.at[sequence, column].set(tokens, mode="drop", unique_indices=True)
