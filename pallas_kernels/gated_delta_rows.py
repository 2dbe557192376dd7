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

Limits of the kernel: Dk and Dv powers of two from 16 to 256. The convolution before and the gated
norm behind stay outside: both are one fusion of XLA over few rows. Length-one scaling, decay and
query scale are inside, since here they cost no trip to memory.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._launch import (
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    dispatch,
    show,
)

NORM_EPS = 1e-6  # beside the sum of squares, inside the root


@dataclass(frozen=True, slots=True)
class GatedDeltaRowsConfig:
    """block_v: columns of the state that one program holds in registers, all Dk rows of them."""

    block_v: int = 32
    num_warps: int = 4
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
    unserved = _check_operands(
        op, qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept,
        num_key_heads,
    )  # fmt: skip
    del config, unserved
    return dispatch(
        op,
        impl,
        None,
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
        num_key_heads=num_key_heads,
    )


def gated_delta_rows_xla(
    qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept, *, num_key_heads
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rows` as a loop over rows, every sequence at its own row.

    The loop runs as often as the longest sequence has rows, so its length is data: a loop of known
    length may be unrolled, and then rows would not share a body.
    """
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
        row = _split_heads(mixed, num_key_heads, heads, key_dim, value_dim)
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


def _split_heads(mixed, key_heads, heads, key_dim, value_dim):
    """q, k [B, Hv, Dk] repeated for their value heads, and v [B, Hv, Dv]."""
    batch, width = mixed.shape[0], key_heads * key_dim

    def of_values(x):
        x = x.reshape(batch, key_heads, 1, key_dim)
        wide = jnp.broadcast_to(x, (batch, key_heads, heads // key_heads, key_dim))
        return wide.reshape(batch, heads, key_dim)

    q, k = of_values(mixed[:, :width]), of_values(mixed[:, width : 2 * width])
    return q, k, mixed[:, 2 * width :].reshape(batch, heads, value_dim)


def _advance(state, q, k, v, decay, beta):
    """One row: the state [B, Hv, Dk, Dv] after it, and its output [B, Hv, Dv]."""
    q = q * (_inverse_length(q) * q.shape[-1] ** -0.5)
    k = (k * _inverse_length(k))[..., None]  # [B, Hv, Dk, 1]
    state = decay[:, :, None, None] * state
    error = beta[:, :, None] * (v - jnp.sum(k * state, axis=2))
    state = state + k * error[:, :, None, :]
    return state, jnp.sum(q[..., None] * state, axis=2)


def _inverse_length(x):
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def _check_operands(
    op, qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept, key_heads
):
    """Check operands against each other."""
    batch, rows, width = check_rank(op, "qkv", qkv, "B R C")
    num_slots, heads, key_dim, value_dim = check_rank(op, "state", state, "S Hv Dk Dv")
    most = check_rank(op, "past_kv", past_kv, "S A C")[1]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"{op}: state {show(state)} has {heads} value heads, not a multiple of {key_heads} "
            "key heads"
        )
    key_width = key_heads * key_dim
    wanted = 2 * key_width + heads * value_dim
    if width != wanted:
        raise ValueError(
            f"{op}: qkv is {show(qkv)}, wanted {wanted} channels for {key_heads} key heads and "
            f"state {show(state)}"
        )
    check_shape(op, "past_kv", past_kv, (num_slots, most, wanted - key_width))
    for name, x in (("g", g), ("beta", beta)):
        check_shape(op, name, x, (batch, rows, heads))
    for name, x in (("past_g", past_g), ("past_beta", past_beta)):
        check_shape(op, name, x, (num_slots, most, heads))
    for name, x in (("num_rows", num_rows), ("slots", slots), ("num_kept", num_kept)):
        check_shape(op, name, x, (batch,))
        check_dtype(op, name, x, jnp.int32)
    check_float(op, qkv=qkv)
    check_dtype(op, "past_kv", past_kv, jnp.result_type(qkv))
    gates = {"g": g, "beta": beta, "past_g": past_g, "past_beta": past_beta}
    for name, x in {"state": state, **gates}.items():
        check_dtype(op, name, x, jnp.float32)
    return None
