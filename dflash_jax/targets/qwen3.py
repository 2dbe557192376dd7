"""Qwen3, Llama, Qwen3-MoE and the hybrids: rows of any step form to hidden rows and features.

One function serves all families, prefill chunks, plain steps and verification: layers say by what
they hold whether they are attention or Gated DeltaNet, dense or experts, and rows differ only in
their metadata. Features are taken at layer outputs, before the next norm.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.config import TargetConfig
from dflash_jax.gdn_state import GdnLayerState, GdnState, keep_rows
from dflash_jax.layers import embed, linear, rms_norm, rope_angles, swiglu
from dflash_jax.metadata import AttnMetadata
from dflash_jax.paged_kv import write_and_attend
from dflash_jax.params import LayerParams, TargetParams
from dflash_jax.state import Buffers
from dflash_jax.targets.gated_delta import RecurrentRows, gated_delta_layer
from dflash_jax.targets.moe import mixture


class TargetOutput(NamedTuple):
    """What a forward pass leaves."""

    residual: jax.Array  # [N, E] output of the last layer
    hidden: jax.Array  # [N, E] after the final norm, what the head reads
    features: jax.Array  # [N, M*E] tapped layer outputs, in id order
    buffers: Buffers


def forward(
    params: TargetParams,
    tokens: jax.Array,
    meta: AttnMetadata,
    args: jax.Array,
    buffers: Buffers,
    *,
    taps: tuple[int, ...] = (),
    slots: jax.Array | None = None,
    is_prefill: bool = False,
    impl: str = "auto",
) -> TargetOutput:
    """Run rows through a target.

    Args:
      params: TargetParams.
      tokens: i32[N] ids.
      meta: AttnMetadata of the rows.
      args: u32[B, 3] (kv_len, q_offset, q_rope_pos).
      buffers: donated; the first pools, one an attention layer of this target, and the states of
        its Gated-DeltaNet layers are updated in place.
      taps: layer-output ids whose rows become features; -1 is the embedding's output.
      slots: i32[B] where the sequences' states are; a dense target has none.
      is_prefill: the rows are part of the text for certain, so states advance past them. Otherwise
        they wait for `gdn_state.keep_rows`.
    """
    config = params.config
    k_pools, v_pools = list(buffers.k_pools), list(buffers.v_pools)
    capacity = meta.block_table.shape[1] * k_pools[0].shape[2]
    angles = rope_angles(meta.positions, config.rope, config.head_dim, capacity)
    rows, states = _recurrent_rows(params, args, buffers, slots, is_prefill)
    x = embed(tokens, params.embed)  # [N, E]
    features = [x] if -1 in taps else []
    num_attention = num_recurrent = 0
    for i, layer in enumerate(params.layers):
        if layer.gdn is not None and rows is not None and config.gdn is not None:
            normed = rms_norm(x, layer.input_norm, config.rms_eps)
            y, states[num_recurrent] = gated_delta_layer(
                layer.gdn,
                normed,
                rows,
                states[num_recurrent],
                config.gdn,
                eps=config.rms_eps,
                impl=impl,
            )
            num_recurrent += 1
            x = x + y
        else:
            pools = k_pools[num_attention], v_pools[num_attention]
            norm = {"norm": layer.input_norm, "residual": x}
            x, k_pools[num_attention], v_pools[num_attention] = attention(
                layer, x, meta, args, angles, *pools, config, **norm, impl=impl
            )
            num_attention += 1
        x = feed_forward(layer, x, config, norm=layer.post_norm, residual=x, impl=impl)
        if i in taps:
            features.append(x)
    none = jnp.zeros((x.shape[0], 0), x.dtype)
    return TargetOutput(
        residual=x,
        hidden=rms_norm(x, params.norm, config.rms_eps),
        features=jnp.concatenate(features, axis=1) if features else none,
        buffers=buffers.replace(
            k_pools=tuple(k_pools),
            v_pools=tuple(v_pools),
            gdn=_states_after(buffers, rows, states),
        ),
    )


def _recurrent_rows(
    params: TargetParams,
    args: jax.Array,
    buffers: Buffers,
    slots: jax.Array | None,
    is_prefill: bool,
) -> tuple[RecurrentRows | None, list[GdnLayerState]]:
    """The rows as Gated-DeltaNet layers see them, and those layers' states."""
    if params.config.gdn is None:
        return None, []
    if buffers.gdn is None or slots is None:
        raise ValueError(
            "targets.forward: a hybrid target needs slots and the states in buffers.gdn"
        )
    kv_len, start = args[:, 0].astype(jnp.int32), args[:, 1].astype(jnp.int32)
    num_rows = kv_len - start
    kept = buffers.gdn.num_kept.at[slots].get(mode="fill", fill_value=0)
    # A sequence without rows takes no part, and a new one has kept nothing: then the slot may hold
    # anything.
    kept = jnp.where((num_rows > 0) & (start > 0), kept, jnp.zeros_like(kept))
    return RecurrentRows(slots, start, num_rows, kept, is_prefill), list(buffers.gdn.layers)


def _states_after(
    buffers: Buffers, rows: RecurrentRows | None, states: list[GdnLayerState]
) -> GdnState | None:
    """The states with what the layers made of them; a prefill leaves nothing to be folded."""
    if buffers.gdn is None or rows is None:
        return buffers.gdn
    gdn = buffers.gdn.replace(layers=tuple(states))
    if rows.is_prefill:
        gdn = keep_rows(gdn, rows.slots, rows.num_rows, jnp.zeros_like(rows.num_rows))
    return gdn


def attention(
    layer: LayerParams,
    x: jax.Array,
    meta: AttnMetadata,
    args: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    k_pool: jax.Array,
    v_pool: jax.Array,
    config: TargetConfig,
    *,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    impl: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention sub-layer: what it adds to the stream for x[N, E], and the pools.

    With `norm` the rows are normed first; with `residual` the first result is the sum with it.
    """
    qkv = linear(x, layer.qkv, layer.qkv_bias, norm=norm, eps=config.rms_eps, impl=impl)
    out, k_pool, v_pool, *_ = write_and_attend(
        qkv,
        (layer.q_norm, layer.k_norm),
        angles,
        k_pool,
        v_pool,
        meta,
        args,
        num_heads=config.num_heads,
        eps=config.rms_eps,
        impl=impl,
    )
    if config.has_output_gate:
        gate = qkv[:, qkv.shape[1] - out.shape[1] :]
        out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
    return linear(out, layer.o, layer.o_bias, residual=residual, impl=impl), k_pool, v_pool


def feed_forward(
    layer: LayerParams,
    x: jax.Array,
    config: TargetConfig,
    *,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    impl: str,
) -> jax.Array:
    """Feed-forward sub-layer, dense or of experts: what it adds for x[N, E].

    With `norm` the rows are normed first; with `residual` the result is the sum with it.
    """
    if layer.router is not None and config.moe is not None:
        x = x if norm is None else rms_norm(x, norm, config.rms_eps)
        y = mixture(layer, x, config.moe, impl=impl)
        return y if residual is None else residual + y
    inner = swiglu(x, layer.gate_up, norm=norm, eps=config.rms_eps, impl=impl)  # [N, F]
    return linear(inner, layer.down, residual=residual, impl=impl)
