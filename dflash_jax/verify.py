"""Verification: the target's rows against the drafts (spec/verify.md §2).

By default every step runs in one width and rows beyond the cut are masked, which is what makes a
drafted and a plain decode equal to the bit. With `DecodeOptions.verify_widths` the target, its head
and the acceptance run in the narrowest of several widths; what comes back has the full one.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as pk
from dflash_jax import targets
from dflash_jax.acceptance import Noise, accept_drawn, leading
from dflash_jax.distribution import (
    distribution,
    processed_logits,
    target_choice,
    token_logprobs,
)
from dflash_jax.drafters.proposal import Proposal
from dflash_jax.fixed import Fixed
from dflash_jax.gdn_state import check_gdn_state
from dflash_jax.layers import logits_of
from dflash_jax.metadata import indirect_args, rows_metadata
from dflash_jax.options import DecodeOptions
from dflash_jax.params import Params
from dflash_jax.sampling import Purpose, positions_behind, uniforms
from dflash_jax.state import Buffers, DecodeState, Status


class Verification(NamedTuple):
    """What the target says of a block. `committed[b, :num_committed[b]]` are the new tokens."""

    committed: jax.Array  # i32[B, R] accepted drafts, then the target's own token
    num_accepted: jax.Array  # i32[B] leading drafts that are accepted
    num_committed: jax.Array  # i32[B] accepted drafts and bonus, cut at a stop and by the budget
    num_rows: jax.Array  # i32[B] rows verified
    status: jax.Array  # i32[B] after the step
    tokens: jax.Array  # i32[B, R] what stood in the rows: anchor and drafts
    features: jax.Array  # [N, M*E] of all rows
    hidden: jax.Array  # [N, E] of all rows
    hashes: jax.Array | None  # u32[B, R] of each row's logits, if certified
    logprobs: jax.Array | None  # f32[B, R] of `committed` under the model itself, if asked for
    width: jax.Array | None = None  # i32[] rows a sequence that ran, if there was a choice


def verify(
    params: Params,
    proposal: Proposal,
    num_rows: jax.Array,
    state: DecodeState,
    buffers: Buffers,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[Verification, Buffers]:
    """Run anchor and drafts through the target and accept leading drafts (see `acceptance`).

    Args:
      params: the pair.
      proposal: drafts.
      num_rows: i32[B] rows the step may take: anchor and kept drafts, 0 for a finished sequence.
      state: DecodeState.
      buffers: donated; target pools, `logits`, `verify_batch_tokens` and the step arrays change.
      options: `certify` also hashes each row's logits; `sampling` as in `state.sampling`;
        `verify_widths` are the narrower widths to choose from.

    Raises:
      ValueError: states or widths that `fixed` has no room for.
    """
    check_gdn_state("verify", buffers.gdn, buffers.verify_wy_tables, fixed)
    widths = options.widths(fixed)
    rows = jnp.minimum(num_rows, proposal.num_proposed + 1)
    static = {"fixed": fixed, "options": options}
    if len(widths) == 1:
        return _verify_rows(params, proposal, rows, state, buffers, width=widths[0], **static)
    table = jnp.asarray(widths, jnp.int32)
    index = jnp.sum(jnp.max(rows) > table[:-1], dtype=jnp.int32)
    forms = [partial(_verify_rows, width=width, **static) for width in widths]
    found, buffers = lax.switch(index, forms, params, proposal, rows, state, buffers)
    return found._replace(width=table[index]), buffers


def _verify_rows(
    params: Params,
    proposal: Proposal,
    rows: jax.Array,
    state: DecodeState,
    buffers: Buffers,
    *,
    width: int,
    fixed: Fixed,
    options: DecodeOptions,
) -> tuple[Verification, Buffers]:
    """Verify i32[B] `rows` in a call of `width` a sequence; the results have the full width."""
    meta = rows_metadata(
        state.seq_lens, rows, buffers.meta.block_table, fixed.verify_rows, fixed.page_size
    )
    own = meta
    if width < fixed.verify_rows:
        table = buffers.meta.block_table
        own = rows_metadata(state.seq_lens, rows, table, width, fixed.page_size)
        proposal = _leading_drafts(proposal, width - 1)
    spread = partial(_spread, batch=fixed.batch, rows=fixed.verify_rows)
    tokens = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)  # [B, width]
    hidden, features, buffers = target_rows(
        params,
        tokens.reshape(-1),
        own,
        indirect_args(state.seq_lens, rows),
        buffers,
        slots=buffers.verify_wy_tables,
        spread=spread,
        impl=options.impl,
    )
    logits = logits_of(hidden, params.target.lm_head, impl=options.impl)  # f32[N, V]
    vocab = params.target.config.real_vocab
    greedy = pk.greedy_rows(logits, vocab=vocab, with_hashes=options.certify, impl=options.impl)
    committed, num_accepted = _choose(logits, proposal, rows, state, vocab, best=greedy.ids)
    is_finite = greedy.is_finite.reshape(committed.shape)
    num_committed, status = _cut(
        committed, is_finite, jnp.where(rows > 0, num_accepted + 1, 0), state
    )

    def wide(x: jax.Array) -> jax.Array:
        """[B, R] of what each row that ran has."""
        return spread(x.reshape(-1)).reshape(fixed.batch, fixed.verify_rows)

    logprobs = None
    if options.sampling is not None and options.sampling.logprobs:
        logprobs = wide(token_logprobs(logits, committed.reshape(-1), vocab=vocab))
    committed = wide(committed)
    buffers = buffers.replace(
        meta=meta, logits=spread(logits), verify_batch_tokens=committed.reshape(-1)
    )
    return (
        Verification(
            committed=committed,
            num_accepted=num_accepted,
            num_committed=num_committed,
            num_rows=rows,
            status=status,
            tokens=wide(tokens),
            features=spread(features),
            hidden=spread(hidden),
            hashes=None if greedy.hashes is None else wide(greedy.hashes),
            logprobs=logprobs,
        ),
        buffers,
    )


def _leading_drafts(proposal: Proposal, count: int) -> Proposal:
    """The first `count` drafts, all that any sequence verifies."""
    q = jax.tree.map(lambda x: x[:, :count], proposal.q)
    return proposal._replace(tokens=proposal.tokens[:, :count], q=q)


def _spread(x: jax.Array, *, batch: int, rows: int) -> jax.Array:
    """[B * width, ...] rows as they ran, where they lie among [B * rows, ...]; zeros elsewhere."""
    width = x.shape[0] // batch
    if width == rows:
        return x
    apart = x.reshape(batch, width, *x.shape[1:])
    padded = jnp.pad(apart, [(0, 0), (0, rows - width)] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(batch * rows, *x.shape[1:])


def _choose(
    logits: jax.Array,
    proposal: Proposal,
    rows: jax.Array,
    state: DecodeState,
    vocab: int,
    *,
    best: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`committed` i32[B, R] and `num_accepted` i32[B] of target logits f32[N, V].

    `best` i32[N] are their best tokens, if the caller has them.
    """
    drafts, q, sampling = proposal.tokens, proposal.q, state.sampling
    given, logits = logits, processed_logits(logits, drafts, sampling)
    best = best if logits is given else None
    positions = positions_behind(state.seq_lens, drafts.shape[1] + 1)
    if q is None or not drafts.shape[1]:  # without a draft there is nothing to accept
        choice = target_choice(logits, sampling, positions, vocab=vocab, best=best)
        return choice, leading(drafts == choice[:, :-1], rows)
    assert sampling is not None and sampling.keys is not None  # nothing else samples drafts
    p = distribution(logits, sampling.rows(positions.shape[1]), vocab=vocab)
    noise = Noise(
        uniforms(sampling.keys, positions[:, :-1], Purpose.ACCEPT),
        uniforms(sampling.keys, positions, Purpose.RESIDUAL),
        uniforms(sampling.keys, positions, Purpose.TARGET),
    )
    num_accepted, committed = accept_drawn(p.reshape(*positions.shape, -1), q, drafts, rows, noise)
    return committed, num_accepted


def target_rows(
    params: Params,
    tokens: jax.Array,
    meta,
    args: jax.Array,
    buffers: Buffers,
    *,
    slots: jax.Array | None,
    is_prefill: bool = False,
    spread: Callable[[jax.Array], jax.Array] = lambda rows: rows,
    impl: str,
) -> tuple[jax.Array, jax.Array, Buffers]:
    """Run i32[N] tokens through the target: hidden rows [N, E], features [N, M*E], buffers.

    `slots` i32[B] and `is_prefill` as in `targets.forward`; `spread` puts rows where the buffers
    have them.
    """
    out = targets.forward(
        params.target,
        tokens,
        meta,
        args,
        buffers,
        taps=params.taps,
        slots=slots,
        is_prefill=is_prefill,
        impl=impl,
    )

    def lead(field: jax.Array, rows: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(field, spread(rows), 0, axis=0)

    buffers = out.buffers.replace(
        hidden=lead(buffers.hidden, out.hidden),
        residual=lead(buffers.residual, out.residual),
        tokens=lead(buffers.tokens, tokens),
    )
    return out.hidden, out.features, buffers


def is_stop(tokens: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """bool[B, R]: whether tokens[B, R] are among stop_ids[B, 16]."""
    return jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=2)


def _cut(
    committed: jax.Array, is_finite: jax.Array, count: jax.Array, state: DecodeState
) -> tuple[jax.Array, jax.Array]:
    """Cut `count` tokens at a non-finite row, a stop and the budget; the status after that."""
    offset = jnp.arange(committed.shape[1], dtype=jnp.int32)[None]
    wanted = offset < count[:, None]

    def first(mask: jax.Array) -> jax.Array:
        """Index of the first true entry a sequence, R where there is none."""
        return jnp.min(jnp.where(mask, offset, committed.shape[1]), axis=1)

    bad = first(wanted & ~is_finite)
    stop = first(wanted & is_stop(committed, state.stop_ids))
    end = jnp.minimum(jnp.minimum(count, state.remaining), stop + 1)  # if all rows are finite
    taken = jnp.minimum(end, bad)
    status = jnp.full_like(state.status, Status.ACTIVE)
    status = jnp.where(state.seq_lens + taken >= state.max_lens, Status.CONTEXT, status)
    status = jnp.where(state.remaining <= taken, Status.LENGTH, status)
    status = jnp.where(stop < taken, Status.STOP, status)
    status = jnp.where(bad < end, Status.NON_FINITE, status)
    return taken, jnp.where(state.is_active, status, state.status).astype(jnp.int32)
