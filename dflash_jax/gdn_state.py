"""What Gated-DeltaNet layers carry between steps, and how a step's rows come to be kept.

`state` lags behind the committed text by the rows of the last step: those rows' keys, values and
gates stay beside it, and the next step folds the first `num_kept` of them in before it runs its own
(spec/verify.md §4, method B). A rejected row is never folded, so nothing has to be undone.

The convolution's rows are kept as they enter it. The last step's are behind the ones that it read,
so the rows that the next step must see in front of its own start at row `num_kept`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.fixed import ArraySpec, Fixed, GdnLayerSpec, StateTableSpec


class GdnLayerState(struct.PyTreeNode):
    """One layer; S slots, R rows a step, C channels of the convolution."""

    state: jax.Array  # f32[S, Hv, Dk, Dv] before the last step's rows
    conv: jax.Array  # [S, taps - 1 + R, C] rows into the convolution: those in front, the step's
    past_kv: jax.Array  # [S, R, Hk * Dk + Hv * Dv] keys and values of the last step's rows
    past_g: jax.Array  # f32[S, R, Hv] logarithms of their decays
    past_beta: jax.Array  # f32[S, R, Hv] strengths of their writes


class GdnState(struct.PyTreeNode):
    """All layers. A slot that no prefill has touched may hold anything."""

    num_kept: jax.Array  # i32[S] rows of the last step that are part of the text
    layers: tuple[GdnLayerState, ...]


def init_gdn_state(spec: StateTableSpec | None) -> GdnState | None:
    """Zeros, or None without such layers."""
    if spec is None:
        return None

    def zeros(array: ArraySpec) -> jax.Array:
        return jnp.zeros(array.shape, array.dtype)

    def one(layer: GdnLayerSpec) -> GdnLayerState:
        return GdnLayerState(**{name: zeros(getattr(layer, name)) for name in layer.__slots__})

    kept = jnp.zeros((spec.num_slots,), jnp.int32)
    return GdnState(num_kept=kept, layers=tuple(map(one, spec.layers)))


def check_gdn_state(op: str, gdn: GdnState | None, slots: jax.Array | None, fixed: Fixed) -> None:
    """Raise ValueError unless states and slot table are what `fixed` says; costs trace time only.

    A state in another dtype would decode, to other tokens.
    """
    spec = fixed.verify_wy_tables
    if spec is None or gdn is None or slots is None:
        if spec is None and gdn is None and slots is None:
            return
        wanted = "no Gated-DeltaNet state" if spec is None else "states and their slots"
        raise ValueError(f"{op}: buffers and Fixed do not fit: Fixed has {wanted}")
    _check(op, "verify_wy_tables", slots, spec)
    _check(op, "gdn.num_kept", gdn.num_kept, ArraySpec((spec.num_slots,), "int32"))
    if len(gdn.layers) != len(spec.layers):
        raise ValueError(
            f"{op}: buffers.gdn has {len(gdn.layers)} layers, Fixed has {len(spec.layers)}"
        )
    for i, (layer, specs) in enumerate(zip(gdn.layers, spec.layers, strict=True)):
        for name in specs.__slots__:
            _check(op, f"gdn.layers[{i}].{name}", getattr(layer, name), getattr(specs, name))


def _check(op: str, name: str, x: jax.Array, spec: ArraySpec) -> None:
    if x.shape != spec.shape or x.dtype.name != spec.dtype:
        raise ValueError(
            f"{op}: buffers.{name} is {x.dtype.name}{list(x.shape)}, Fixed says "
            f"{spec.dtype}{list(spec.shape)}"
        )


def keep_rows(
    gdn: GdnState | None, slots: jax.Array | None, num_rows: jax.Array, count: jax.Array
) -> GdnState | None:
    """Record that the first `count` i32[B] of a step's rows are part of the text.

    A sequence without rows took no part in the step: what it kept before still waits.
    """
    if gdn is None or slots is None:
        return gdn
    size = gdn.num_kept.shape[0]
    took_part = (num_rows > 0) & (slots >= 0)
    beyond = size + jnp.arange(slots.shape[0], dtype=jnp.int32)  # dropped, and -1 would wrap
    target = jnp.where(took_part, slots, beyond)
    return gdn.replace(
        num_kept=gdn.num_kept.at[target].set(count, mode="drop", unique_indices=True)
    )
