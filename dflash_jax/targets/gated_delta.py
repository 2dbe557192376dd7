"""Gated-DeltaNet layers: rows of a step one after another, a prompt's rows in tiles.

A step's rows run through `gated_delta_rows`, which leaves the state as it was before them; commit
says how many are kept. A prompt's rows are kept at once, so they run through `delta_rule_tiles`,
which is matrix products, equal to the recurrence up to f32 rounding (spec/verify.md §3.1).
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
    """Fold what a step before kept, then run the rows in tiles and keep them all."""
    batch = mixed.shape[0]
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
    out, state = pk.delta_rule_tiles(
        mixed, g, beta, rows.num_rows, state, num_key_heads=c.num_key_heads, impl=impl
    )
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
