"""Gated-DeltaNet layers: rows of a step one after another, a prompt's rows in chunks.

A step's rows run through `gated_delta_rows`, which leaves the state as it was before them; commit
says how many are kept. A prompt's rows are kept at once, so they take the chunked form, which is
matrix products, equal to the recurrence up to f32 rounding (spec/verify.md §3.1).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as pk
from dflash_jax.config import GdnConfig
from dflash_jax.gdn_state import GdnLayerState
from dflash_jax.layers import linear, rms_norm
from dflash_jax.params import GdnParams

CHUNK = 64
_EXACT = lax.Precision.HIGHEST  # of f32 products, which a GPU would else round to TF32
_NORM_EPS = 1e-6  # beside a key's sum of squares, inside the root


class RecurrentRows(NamedTuple):
    """What the rows of a call are to a recurrent layer; B sequences with equally many rows."""

    slots: jax.Array  # i32[B] of the states
    start: jax.Array  # i32[B] tokens before row 0; at 0 a state starts anew, whatever it holds
    num_rows: jax.Array  # i32[B] rows that exist
    num_kept: jax.Array  # i32[B] rows of the step before that are still to be folded in
    is_prefill: bool  # static: the rows are kept at once


def gated_delta_layer(
    params: GdnParams,
    x: jax.Array,
    rows: RecurrentRows,
    carried: GdnLayerState,
    config: GdnConfig,
    *,
    eps: float,
    impl: str,
) -> tuple[jax.Array, GdnLayerState]:
    """What one layer adds to the stream for x[N, E], which the input norm left, and its state."""
    batch = rows.slots.shape[0]
    channels, z, g, beta = _project(params, x, config, batch, impl)
    before = _rows_in_front(carried, rows, config)
    # What is stored for later must be what is used now, bit for bit. Without the barriers XLA may
    # compute it once for each, or keep the wider number that a rounding was to cut.
    window = lax.optimization_barrier(jnp.concatenate([before, channels], axis=1))
    mixed = causal_conv(window, params.conv)
    mixed, g, beta = lax.optimization_barrier((mixed, g, beta))
    run = _prefill_rows if rows.is_prefill else _step_rows
    out, carried = run(window, mixed, g, beta, rows, carried, config, impl)
    normed = rms_norm(out, jnp.ones((config.value_dim,), out.dtype), eps).astype(x.dtype)
    gated = (normed * params.norm[None, None, None]).astype(jnp.float32) * jax.nn.silu(
        z.reshape(out.shape).astype(jnp.float32)
    )
    flat = gated.astype(x.dtype).reshape(x.shape[0], -1)  # [N, Hv*Dv]
    return linear(flat, params.out, impl=impl), carried


def _project(
    params: GdnParams, x: jax.Array, c: GdnConfig, batch: int, impl: str
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Channels [B, R, C] and z [B, R, Hv*Dv] in x.dtype; g and beta f32[B, R, Hv]."""
    projected = linear(x, params.in_proj, impl=impl).reshape(batch, -1, c.in_width)
    values = c.conv_width + c.value_width
    b = projected[:, :, values : values + c.num_value_heads].astype(jnp.float32)
    a = projected[:, :, values + c.num_value_heads :].astype(jnp.float32)
    decay = jax.nn.softplus(a + params.dt_bias[None, None])
    g = -jnp.exp(params.a_log)[None, None] * decay
    channels, z = projected[:, :, : c.conv_width], projected[:, :, c.conv_width : values]
    return channels, z, g, jax.nn.sigmoid(b)


def _rows_in_front(carried: GdnLayerState, rows: RecurrentRows, c: GdnConfig) -> jax.Array:
    """The taps - 1 rows before row 0 [B, taps - 1, C]; zeros before the first token."""
    offset = jnp.arange(c.conv_taps - 1, dtype=jnp.int32)[None]
    index = rows.num_kept[:, None] + offset
    found = carried.conv.at[rows.slots[:, None], index].get(mode="fill", fill_value=0)
    is_new = (rows.start == 0)[:, None, None]
    return jnp.where(is_new, jnp.zeros_like(found), found)


def causal_conv(window: jax.Array, weight: jax.Array) -> jax.Array:
    """silu of the depthwise convolution of window[B, taps - 1 + R, C] by weight[taps, C].

    Sums and silu are f32; the [B, R, C] result is rounded once.
    """
    taps = weight.shape[0]
    rows = window.shape[1] - taps + 1
    wide, w = window.astype(jnp.float32), weight.astype(jnp.float32)
    total = wide[:, :rows] * w[0][None, None]
    for j in range(1, taps):
        total = total + wide[:, j : j + rows] * w[j][None, None]
    return jax.nn.silu(total).astype(window.dtype)


def _step_rows(
    window: jax.Array,
    mixed: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    rows: RecurrentRows,
    carried: GdnLayerState,
    c: GdnConfig,
    impl: str,
) -> tuple[jax.Array, GdnLayerState]:
    """Fold what the step before kept, run these rows, and leave them to be folded."""
    out, state = pk.gated_delta_rows(
        mixed,
        g,
        beta,
        rows.num_rows,
        carried.state,
        rows.slots,
        carried.past_kv,
        carried.past_g,
        carried.past_beta,
        rows.num_kept,
        num_key_heads=c.num_key_heads,
        impl=impl,
    )
    target = _written(rows, carried)

    def put(field: jax.Array, value: jax.Array) -> jax.Array:
        if value.shape[1] < field.shape[1]:  # fewer rows than a full step; those behind stay unread
            columns = field.at[target, : value.shape[1]]
            return columns.set(value, mode="drop", unique_indices=True)
        return field.at[target].set(value, mode="drop", unique_indices=True)

    carried = carried.replace(
        state=state,
        conv=put(carried.conv, window),
        past_kv=put(carried.past_kv, mixed[:, :, c.key_width :]),
        past_g=put(carried.past_g, g),
        past_beta=put(carried.past_beta, beta),
    )
    return out, carried


def _prefill_rows(
    window: jax.Array,
    mixed: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    rows: RecurrentRows,
    carried: GdnLayerState,
    c: GdnConfig,
    impl: str,
) -> tuple[jax.Array, GdnLayerState]:
    """Fold what a step before kept, then run the rows in chunks and keep them all."""
    batch, count = mixed.shape[:2]
    nothing = mixed[:, :1], g[:, :1], beta[:, :1], jnp.zeros_like(rows.num_rows)
    _, folded = pk.gated_delta_rows(
        *nothing,
        carried.state,
        rows.slots,
        carried.past_kv,
        carried.past_g,
        carried.past_beta,
        rows.num_kept,
        num_key_heads=c.num_key_heads,
        impl=impl,
    )
    state = folded.at[rows.slots].get(mode="fill", fill_value=0)
    is_new = (rows.start == 0)[:, None, None, None]
    state = jnp.where(is_new, jnp.zeros_like(state), state)
    q, k, v = _heads(mixed.astype(jnp.float32), c)
    is_row = jnp.arange(count, dtype=jnp.int32)[None] < rows.num_rows[:, None]
    out, state = chunked_delta_rule(q, k, v, g, beta, state, is_row)
    target = _written(rows, carried)
    taps = c.conv_taps - 1
    index = rows.num_rows[:, None] + jnp.arange(taps, dtype=jnp.int32)[None]
    last = window[jnp.arange(batch, dtype=jnp.int32)[:, None], index]  # [B, taps - 1, C]
    carried = carried.replace(
        state=folded.at[target].set(state, mode="drop", unique_indices=True),
        conv=carried.conv.at[target, :taps].set(last, mode="drop", unique_indices=True),
    )
    return out, carried


def _written(rows: RecurrentRows, carried: GdnLayerState) -> jax.Array:
    """i32[B] slots to write; where there is no row, one that is out of range and dropped."""
    size = carried.state.shape[0]
    beyond = size + jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    return jnp.where((rows.num_rows > 0) & (rows.slots >= 0), rows.slots, beyond)


def _heads(mixed: jax.Array, c: GdnConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k of length one [B, T, Hv, Dk], q scaled, and v [B, T, Hv, Dv]."""
    shape, share = mixed.shape[:2], c.num_value_heads // c.num_key_heads

    def of_values(x: jax.Array) -> jax.Array:
        x = x.reshape(*shape, c.num_key_heads, c.key_dim)
        x = x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)
        return jnp.repeat(x, share, axis=2)

    q, k = mixed[..., : c.key_width], mixed[..., c.key_width : 2 * c.key_width]
    v = mixed[..., 2 * c.key_width :].reshape(*shape, c.num_value_heads, c.value_dim)
    return of_values(q) * c.key_dim**-0.5, of_values(k), v


def chunked_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    is_row: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over whole sequences, CHUNK rows at a time.

    Args:
      q, k: f32[B, T, Hv, Dk] of length one, q scaled.
      v: f32[B, T, Hv, Dv].
      g, beta: f32[B, T, Hv].
      state: f32[B, Hv, Dk, Dv] before the first row.
      is_row: bool[B, T]; what does not exist changes nothing.
    Returns:
      out f32[B, T, Hv, Dv], and the state after the last row.
    """
    batch, count = is_row.shape
    size = min(CHUNK, count)
    pad = -count % size

    def in_chunks(x: jax.Array) -> jax.Array:
        """[B, T, Hv, ...] -> [chunks, B, Hv, size, ...], with zeros where there is no row."""
        there = is_row.reshape(batch, count, *(1,) * (x.ndim - 2))
        x = jnp.where(there, x, jnp.zeros_like(x))
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    def one(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = chunk
        out, state = _chunk(q, k, v, g, beta, state)
        return state, out

    state, out = lax.scan(one, state, tuple(map(in_chunks, (q, k, v, g, beta))))
    out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1)  # [B, chunks, size, Hv, Dv]
    return out.reshape(batch, count + pad, *out.shape[3:])[:, :count], state


def _chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One chunk of C rows: q, k [B, H, C, Dk], v [B, H, C, Dv], g, beta [B, H, C].

    The corrections e solve a triangular system, by substitution: its inverse as a product of
    powers loses all digits where keys repeat, as they do in a prompt that repeats a word.
    """
    rows = q.shape[2]
    total = jnp.cumsum(g, axis=2)  # [B, H, C] logarithm of the decay up to each row
    is_past = jnp.tri(rows, dtype=bool)[None, None]
    gap = jnp.where(is_past, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(gap)  # [B, H, C, C], zero for rows that come later
    weighted = beta[..., None] * k
    lower = _dot("bhik,bhjk->bhij", weighted, k) * jnp.where(
        jnp.tri(rows, k=-1, dtype=bool)[None, None], decay, jnp.zeros_like(decay)
    )
    grown = jnp.exp(total)[..., None]
    right = jnp.concatenate([beta[..., None] * v, weighted * grown], axis=3)
    unit = lower + jnp.eye(rows, dtype=lower.dtype)[None, None]
    solved = lax.linalg.triangular_solve(
        unit, right, left_side=True, lower=True, unit_diagonal=True
    )
    values, keys = solved[..., : v.shape[3]], solved[..., v.shape[3] :]
    errors = values - _dot("bhik,bhkv->bhiv", keys, state)  # [B, H, C, Dv]
    scores = _dot("bhik,bhjk->bhij", q, k) * decay
    out = _dot("bhik,bhkv->bhiv", q * grown, state) + _dot("bhij,bhjv->bhiv", scores, errors)
    left = jnp.exp(total[..., -1:] - total)[..., None]  # decay from each row to the chunk's end
    state = state * grown[:, :, -1:] + _dot("bhik,bhiv->bhkv", k * left, errors)
    return out, state


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=_EXACT, preferred_element_type=jnp.float32)
