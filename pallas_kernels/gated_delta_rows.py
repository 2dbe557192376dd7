"""Gated-DeltaNet rows, one after another: fold the rows that were kept, then run new ones.

A step first folds the accepted rows of the step before into the state, from what that step left of
them, then runs its own rows without keeping what they do to the state: whether they are accepted is
known only after the last layer. So one read and one write of the state a step are enough, and a
rejected row leaves no trace (spec/verify.md §4, method B).

Per value head, state S [Dk, Dv] in f32, row (q, k, v, g, beta), q and k of length one
(Gated Delta Networks, arXiv:2412.06464; spec/verify.md §3):

    S = exp(g) S;  e = beta (v - k^T S);  S = S + k e^T;  o = q^T S / sqrt(Dk)

A row is products and sums over Dk in an order that nothing changes: neither how many rows there
are, nor whether a row is folded or new, nor its place among them. Both kinds run through one loop
body, since two bodies could round differently. No dot is used: a dot's order is the compiler's.

The kernel runs a warp for each sequence, value head and `block_v` columns of S, which it holds in
registers: it reads them once and writes them once, between the kept rows and the new ones. Rows
are a chain, so what counts is how long one takes: the next row is read ahead, no warp waits
for another, and all sums over Dk are of the state before the row, since o sqrt(Dk) =
exp(g) q^T S + (q^T k) e. A row issues about 740 instructions a warp in SASS for an H200, and 48
heads of 128 are 384 warps for its 528 schedulers: 16 rows after 8 kept ones take 23 us at one
sequence and 84 at eight, 0.9 us a row where memory would allow 1.6 and 12.8 us in all.
Length-one scaling, decay and query scale are inside, where they cost no trip to memory. The
convolution before and the gated norm behind stay outside: each is one fusion of XLA over R rows of
20 KiB (Qwen3.8-27B) beside 6 MiB of state, and the norm needs a whole head's columns, which would
leave 48 programs for 132 multiprocessors.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._delta_rule import (
    NORM_EPS,
    check_rows,
    inverse_length,
    split_heads,
    unserved_dims,
)
from pallas_kernels._launch import check_dtype, check_rank, check_shape, dispatch


@dataclass(frozen=True, slots=True)
class GatedDeltaRowsConfig:
    """block_v: columns of the state that one program holds in registers, all Dk rows of them.

    One warp sums over Dk by shuffles alone; more would meet at a barrier a dozen times a row.
    """

    block_v: int = 16
    num_warps: int = 1
    num_stages: int = 1


def gated_delta_rows(
    qkv,
    g,
    beta,
    num_rows,
    state,
    slots,
    past_kv,
    past_g,
    past_beta,
    num_kept,
    *,
    num_key_heads: int,
    impl: str = "auto",
    config: GatedDeltaRowsConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Fold kept rows into the state, then run new rows over it.

    Letters: B sequences, R new rows, A rows that may be kept, S slots, Hk and Hv heads of Dk and Dv
    dims. Value head h reads key head h // (Hv / Hk).

    Args:
      qkv: bf16|f32[B, R, 2*Hk*Dk + Hv*Dv] queries, keys, values of new rows, after the convolution.
      g: f32[B, R, Hv] logarithm of each row's decay, at most 0.
      beta: f32[B, R, Hv] strength of each row's write.
      num_rows: i32[B] new rows that exist; the outputs of the others are zeros.
      state: f32[S, Hv, Dk, Dv], updated in place under donation: it comes back with the kept rows
        folded in and without the new ones.
      slots: i32[B] where each sequence's state is; different ones. A sequence with one outside of
        the state has no rows.
      past_kv: bf16|f32[S, A, Hk*Dk + Hv*Dv] keys and values of the step before, in the dtype of
        `qkv`.
      past_g, past_beta: f32[S, A, Hv] its gates.
      num_kept: i32[B] leading ones of those rows that are folded.
      num_key_heads: Hk.
      impl: which implementation runs.
      config: tiles of the kernel.
    Returns:
      f32[B, R, Hv, Dv] outputs, and the state.
    """
    op = "gated_delta_rows"
    _check_operands(
        op, qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept,
        num_key_heads,
    )  # fmt: skip
    key_dim, value_dim = state.shape[2:]
    if config is None:  # 128 values of the state a thread would leave no registers for a row
        config = GatedDeltaRowsConfig(block_v=16 if key_dim <= 128 else 8)
    return dispatch(
        op,
        impl,
        _by_kernel,
        gated_delta_rows_xla,
        qkv,
        g,
        beta,
        num_rows,
        state,
        slots,
        past_kv,
        past_g,
        past_beta,
        num_kept,
        unserved=unserved_dims(op, config.block_v, key_dim, value_dim),
        num_key_heads=num_key_heads,
        config=config,
    )


@partial(jax.jit, static_argnames=("num_key_heads", "config", "interpret"))
def _by_kernel(
    qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept,
    *, num_key_heads, config, interpret,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Launch a program for each sequence, value head and columns of its state."""
    batch, rows = qkv.shape[:2]
    _, heads, _, value_dim = state.shape
    block_v = min(config.block_v, value_dim)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out_shape = [
        jax.ShapeDtypeStruct((batch, rows, heads, value_dim), jnp.float32),
        jax.ShapeDtypeStruct(state.shape, state.dtype),
    ]
    out = pl.pallas_call(
        partial(_gated_delta_rows_kernel, num_key_heads=num_key_heads, block_v=block_v),
        out_shape=out_shape,
        grid=(value_dim // block_v, heads, batch),
        in_specs=[whole] * 10,
        out_specs=[whole] * 2,
        input_output_aliases={9: 1},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="gated_delta_rows",
    )(slots, num_rows, num_kept, qkv, g, beta, past_kv, past_g, past_beta, state)
    return out[0], out[1]


class _Row(NamedTuple):
    """One row of a head as it was read; in pairs, what is zero unless it was kept or is new."""

    q: jax.Array  # [Dk], of a new row
    k: tuple[jax.Array, jax.Array]  # [Dk]
    v: tuple[jax.Array, jax.Array]  # [block_v]
    g: tuple[jax.Array, jax.Array]  # f32[]
    beta: tuple[jax.Array, jax.Array]  # f32[]


def _gated_delta_rows_kernel(
    slots_ref,  # i32[B]
    num_rows_ref,  # i32[B]
    num_kept_ref,  # i32[B]
    qkv_ref,  # [B, R, 2*Hk*Dk + Hv*Dv]
    g_ref,  # f32[B, R, Hv]
    beta_ref,  # f32[B, R, Hv]
    past_kv_ref,  # [S, A, Hk*Dk + Hv*Dv]
    past_g_ref,  # f32[S, A, Hv]
    past_beta_ref,  # f32[S, A, Hv]
    _state_in_ref,  # f32[S, Hv, Dk, Dv], the memory of state_ref
    out_ref,  # out f32[B, R, Hv, Dv]
    state_ref,  # out f32[S, Hv, Dk, Dv]
    *,
    num_key_heads,
    block_v,
):
    """block_v columns of one head's state: kept rows, a write, new rows."""
    first, head, b = pl.program_id(0) * block_v, pl.program_id(1), pl.program_id(2)
    num_slots, heads, key_dim, value_dim = state_ref.shape
    rows, most = qkv_ref.shape[1], past_kv_ref.shape[1]
    key_head, key_width = head // (heads // num_key_heads), num_key_heads * key_dim
    row_of_state = jnp.arange(key_dim, dtype=jnp.int32)
    column = first + jnp.arange(block_v, dtype=jnp.int32)
    q_channel = key_head * key_dim + row_of_state
    v_channel = key_width + head * value_dim + column  # of past_kv; queries come before in qkv
    is_here = (slots_ref[b] >= 0) & (slots_ref[b] < num_slots)
    slot = jnp.clip(slots_ref[b], 0, num_slots - 1)
    kept = jnp.where(is_here, num_kept_ref[b], 0)
    new = jnp.where(is_here, num_rows_ref[b], 0)
    tile = (slot, head, row_of_state[:, None], column[None, :])
    everywhere = jnp.full((key_dim, block_v), True)

    def read_row(i) -> _Row:
        """Loads of row i, none of them waited for; what is not its kind is not read."""
        is_past = i < kept
        past, row = jnp.clip(i, 0, most - 1), jnp.clip(i - kept, 0, rows - 1)
        new_at = lambda channel: (b, row, channel)

        def either(past_ref, past_at, new_ref, new_at, shape):
            old = jnp.full(shape, is_past)
            x = plgpu.load(past_ref.at[past_at], mask=old, other=0.0)
            return x, plgpu.load(new_ref.at[new_at], mask=~old, other=0.0)

        def channels(at, shape):
            return either(past_kv_ref, (slot, past, at), qkv_ref, new_at(key_width + at), shape)

        return _Row(
            plgpu.load(qkv_ref.at[new_at(q_channel)]),
            channels(q_channel, (key_dim,)),
            channels(v_channel, (block_v,)),
            either(past_g_ref, (slot, past, head), g_ref, new_at(head), ()),
            either(past_beta_ref, (slot, past, head), beta_ref, new_at(head), ()),
        )

    def one_row(i, carry):
        state, row = carry  # f32[Dk, block_v], row i
        ahead = read_row(i + 1)
        is_past = i < kept
        pick = lambda pair: jnp.where(is_past, *pair).astype(jnp.float32)
        q, k, v = row.q.astype(jnp.float32), pick(row.k), pick(row.v)
        decay, beta = jnp.exp(pick(row.g)), pick(row.beta)
        # Five sums that wait for nothing but the state before the row, so that they overlap.
        k_of_state = jnp.sum(k[:, None] * state, axis=0)
        q_of_state = jnp.sum(q[:, None] * state, axis=0)
        k_scale = lax.rsqrt(jnp.sum(k * k) + NORM_EPS)
        q_scale = lax.rsqrt(jnp.sum(q * q) + NORM_EPS) * key_dim**-0.5
        error = beta * (v - (k_scale * decay) * k_of_state) * k_scale
        o = q_scale * (decay * q_of_state + jnp.sum(q * k) * error)
        state = decay * state + k[:, None] * error[None, :]
        mask = jnp.full((block_v,), ~is_past)
        plgpu.store(out_ref.at[b, i - kept, head, column], o, mask=mask)
        return state, ahead

    def phase(p, carry):
        """Phase 0 runs the kept rows and writes the state, phase 1 runs the new ones."""
        is_new = p == 1
        begin, end = jnp.where(is_new, kept, 0), jnp.where(is_new, kept + new, kept)
        state, ahead = lax.fori_loop(begin, end, one_row, carry)
        plgpu.store(state_ref.at[tile], state, mask=everywhere & (p == 0) & (kept > 0))
        return state, ahead

    state = plgpu.load(state_ref.at[tile], mask=everywhere & is_here, other=0.0)
    # Two loops would be two bodies, and a known number of phases could be unrolled to as many.
    lax.fori_loop(0, 1 + jnp.minimum(new, 1), phase, (state, read_row(jnp.int32(0))))

    def no_row(i, carry):
        plgpu.store(out_ref.at[b, i, head, column], jnp.zeros((block_v,), jnp.float32))
        return carry

    lax.fori_loop(new, rows, no_row, 0)


def gated_delta_rows_xla(
    qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept,
    *, num_key_heads, config=None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`gated_delta_rows` as a loop over rows, every sequence at its own row.

    The loop runs as often as the longest sequence has rows, so its length is data: a loop of known
    length may be unrolled, and then rows would not share a body.
    """
    del config  # tiles of the kernel
    batch, rows = qkv.shape[:2]
    most = past_kv.shape[1]
    _, heads, key_dim, value_dim = state.shape
    key_width = num_key_heads * key_dim
    is_here = (slots >= 0) & (slots < state.shape[0])
    kept = jnp.where(is_here, num_kept, 0)  # [B]
    total = kept + jnp.where(is_here, num_rows, 0)

    def of_slot(x):
        return x.at[slots].get(mode="fill", fill_value=0)

    # Kept rows have no query, and none of their outputs is used: zeros stand in.
    no_query = jnp.zeros((batch, most, key_width), qkv.dtype)
    old = jnp.concatenate([no_query, of_slot(past_kv)], axis=2)
    rows_qkv = jnp.concatenate([old, qkv], axis=1)  # [B, A + R, C]
    rows_g = jnp.concatenate([of_slot(past_g), g], axis=1)
    rows_beta = jnp.concatenate([of_slot(past_beta), beta], axis=1)
    sequence = jnp.arange(batch, dtype=jnp.int32)

    def one_row(i, carry):
        running, folded, out = carry
        index = jnp.minimum(jnp.where(i < kept, i, most + i - kept), most + rows - 1)
        mixed = rows_qkv[sequence, index].astype(jnp.float32)  # [B, C]
        row = split_heads(mixed, num_key_heads, heads, key_dim, value_dim)
        decay = jnp.exp(rows_g[sequence, index])  # [B, Hv]
        updated, o = _advance(running, *row, decay, rows_beta[sequence, index])
        is_row = (i < total)[:, None, None, None]
        running = jnp.where(is_row, updated, running)
        folded = jnp.where((i < kept)[:, None, None, None], running, folded)
        target = jnp.where((i >= kept) & (i < total), i - kept, rows)  # `rows` is dropped
        out = out.at[sequence, target].set(o, mode="drop", unique_indices=True)
        return running, folded, out

    start = of_slot(state)  # [B, Hv, Dk, Dv]
    out = jnp.zeros((batch, rows, heads, value_dim), jnp.float32)
    _, folded, out = lax.fori_loop(0, jnp.max(total), one_row, (start, start, out))
    # -1 would wrap, and a slot that is out of range is dropped.
    target = jnp.where(is_here, slots, state.shape[0] + sequence)
    return out, state.at[target].set(folded, mode="drop", unique_indices=True)


def _advance(state, q, k, v, decay, beta):
    """One row: the state [B, Hv, Dk, Dv] after it, and its output [B, Hv, Dv]."""
    q = q * (inverse_length(q) * q.shape[-1] ** -0.5)
    k = (k * inverse_length(k))[..., None]  # [B, Hv, Dk, 1]
    state = decay[:, :, None, None] * state
    error = beta[:, :, None] * (v - jnp.sum(k * state, axis=2))
    state = state + k * error[:, :, None, :]
    return state, jnp.sum(q[..., None] * state, axis=2)


def _check_operands(
    op, qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept, key_heads
):
    """Check operands against each other."""
    check_rows(op, qkv, g, beta, num_rows, state, key_heads)
    batch, _, width = jnp.shape(qkv)
    num_slots, heads, key_dim, _ = jnp.shape(state)
    most = check_rank(op, "past_kv", past_kv, "S A C")[1]
    check_shape(op, "past_kv", past_kv, (num_slots, most, width - key_heads * key_dim))
    check_dtype(op, "past_kv", past_kv, jnp.result_type(qkv))
    for name, x in (("past_g", past_g), ("past_beta", past_beta)):
        check_shape(op, name, x, (num_slots, most, heads))
        check_dtype(op, name, x, jnp.float32)
    for name, x in (("slots", slots), ("num_kept", num_kept)):
        check_shape(op, name, x, (batch,))
        check_dtype(op, name, x, jnp.int32)
