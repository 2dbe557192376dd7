"""The multi-token-prediction head of Qwen3-Next and Qwen3.5 (spec/drafters.md §6).

Row t joins the target's hidden of token t with the embedding of token t + 1 and runs one decoder
layer of the target's own kind over the rows so far; what comes out, after the head's norm, goes
through the target's lm_head and says what stands at t + 2. Committed rows leave keys and values
alone (`advance`). A proposal begins with the last of them, whose next token is the anchor, and goes
on with the head's own output and its own draft, one row a draft; those rows' keys are overwritten
when the text is known.
"""

from typing import cast

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.draft_state import DraftBuffers
from dflash_jax.drafters.choice import before_the_first_fault, choose, draws_of
from dflash_jax.drafters.proposal import CommittedRows, Proposal
from dflash_jax.fixed import DraftFixed, Fixed
from dflash_jax.layers import embed, linear, logits_of, rms_norm, rope_angles
from dflash_jax.metadata import indirect_args, rows_metadata
from dflash_jax.options import DecodeOptions
from dflash_jax.params import MtpParams, Params
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState
from dflash_jax.targets.qwen3 import attention, feed_forward


def join(
    head: MtpParams, embedded: jax.Array, hidden: jax.Array, *, impl: str = "auto"
) -> jax.Array:
    """fc of normed embeddings and normed hidden rows, in this order, [T, E] each."""
    eps = head.config.layer.rms_eps
    normed = [
        rms_norm(embedded, head.embed_norm, eps),
        rms_norm(hidden, head.hidden_norm, eps),
    ]
    return linear(jnp.concatenate(normed, axis=1), head.fc, impl=impl)


def advance(
    params: Params,
    rows: CommittedRows,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    impl: str = "auto",
) -> tuple[Buffers, DflashScratch]:
    """Write keys and values of committed rows, and keep each sequence's last hidden row.

    Args:
      params: the pair; embeddings are the target's.
      rows: of which `next_tokens`, `hidden`, `positions`, `slots` and `sequences` are read.
      buffers: donated; `buffers.draft` changes.
    """
    head, own = cast(MtpParams, params.draft), cast(DraftBuffers, buffers.draft)
    config = head.config.layer
    hidden = rows.hidden
    if head.config.reads_residual:
        hidden = buffers.residual[: hidden.shape[0]]  # of the same rows
    x = join(head, embed(rows.next_tokens, params.target.embed), hidden, impl=impl)
    normed = rms_norm(x, head.layer.input_norm, config.rms_eps)
    kv = linear(normed, head.kv, head.kv_bias, impl=impl)
    written = pk.norm_rope_cache(
        kv,
        *rope_angles(rows.positions, config.rope, config.head_dim, fixed.capacity),
        (own.k_pool,),
        (own.v_pool,),
        rows.slots,
        num_heads=0,
        k_norms=None if head.layer.k_norm is None else (head.layer.k_norm,),
        eps=config.rms_eps,
        impl=impl,
    )
    (k_pool,), (v_pool,) = written.k_pools, written.v_pools
    own = own.replace(k_pool=k_pool, v_pool=v_pool, hidden=_last_rows(own.hidden, hidden, rows))
    return buffers.replace(draft=own), scratch


def _last_rows(kept: jax.Array, hidden: jax.Array, rows: CommittedRows) -> jax.Array:
    """[B, E] with each sequence's last committed row of hidden[T, E], where it has one.

    Committed rows of a sequence stand side by side, before those that are not.
    """
    is_new = rows.slots >= 0
    same = jnp.roll(rows.sequences, -1) == rows.sequences
    goes_on = (jnp.roll(is_new, -1) & same).at[-1].set(False)
    # Distinct indices out of range keep the scatter's promise.
    beyond = kept.shape[0] + jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    index = jnp.where(is_new & ~goes_on, rows.sequences, beyond)
    return kept.at[index].set(hidden.astype(kept.dtype), mode="drop", unique_indices=True)


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
    """Draft token by token; fills `norm_buf`, `logits` and `position_ids`, a row a draft."""
    head, target = cast(MtpParams, params.draft), params.target
    own, sizes = cast(DraftBuffers, buffers.draft), cast(DraftFixed, fixed.draft)
    draws = draws_of(state, fixed=fixed, options=options)
    start = state.seq_lens - 1  # position of the last committed row
    hidden, token = own.hidden, state.anchor
    outs, logits, tokens, qs = [], [], [], []
    args = scratch.option_b_indirect_args_dev
    for j in range(fixed.num_drafts):
        is_run = (j < num_rows - 1).astype(jnp.int32)
        # The keys of the first row are those of a committed one, which are there already.
        own = own.replace(embed=embed(token, target.embed))
        hidden, args, own = _row(
            head, hidden, start + j, is_run, buffers, own, j > 0, fixed=fixed, impl=options.impl
        )
        row = logits_of(hidden, target.lm_head, impl=options.impl)[:, : sizes.vocab]
        token, q = choose(
            row, draws and draws.row(j), vocab=target.config.real_vocab, impl=options.impl
        )
        for kept, x in (outs, hidden), (logits, row), (tokens, token), (qs, q):
            kept.append(x)

    def by_sequence(x: list[jax.Array]) -> jax.Array:
        return jnp.stack(x, axis=1).reshape(fixed.batch * len(x), -1)

    offsets = jnp.arange(fixed.num_drafts, dtype=jnp.int32)[None]
    scratch = scratch.replace(
        norm_buf=by_sequence(outs),
        logits=by_sequence(logits),
        position_ids=(start[:, None] + offsets).reshape(-1),
        option_b_indirect_args_dev=args,
    )
    q = None if draws is None else jnp.stack(qs, axis=1)
    num_proposed, is_finite = before_the_first_fault(jnp.stack(outs, axis=1), num_rows - 1)
    proposal = Proposal(jnp.stack(tokens, axis=1), num_proposed, q, is_finite)
    return proposal, buffers.replace(draft=own), scratch


def _row(
    head: MtpParams,
    hidden: jax.Array,
    positions: jax.Array,
    is_run: jax.Array,
    buffers: Buffers,
    own: DraftBuffers,
    writes: bool,
    *,
    fixed: Fixed,
    impl: str,
) -> tuple[jax.Array, jax.Array, DraftBuffers]:
    """One row a sequence: hidden rows and `own.embed` to the head's output [B, E].

    Args:
      positions: i32[B]; is_run: i32[B], 0 for a sequence whose row does not count.
      writes: whether the row's keys and values go to the pools.
    """
    config, sizes = head.config.layer, cast(DraftFixed, fixed.draft)
    rows = sizes.meta.rows // sizes.meta.sequences
    meta = rows_metadata(positions, is_run, buffers.meta.block_table, rows, sizes.block_size)
    if not writes:
        meta = meta.replace(slot_mapping=jnp.full_like(meta.slot_mapping, -1))
    args = indirect_args(positions, is_run)
    angles = rope_angles(meta.positions, config.rope, config.head_dim, fixed.capacity)
    x = join(head, own.embed, hidden, impl=impl)
    normed = rms_norm(x, head.layer.input_norm, config.rms_eps)
    pools = own.k_pool, own.v_pool
    y, k_pool, v_pool = attention(head.layer, normed, meta, args, angles, *pools, config, impl=impl)
    x = x + y
    normed = rms_norm(x, head.layer.post_norm, config.rms_eps)
    x = x + feed_forward(head.layer, normed, config, impl=impl)
    out = rms_norm(x, head.norm, config.rms_eps)
    return out, args, own.replace(k_pool=k_pool, v_pool=v_pool)
