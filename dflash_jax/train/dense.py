"""Dense forwards for training: whole sequences of the target, many anchors of a drafter at once.

The arithmetic is the inference step's, without pages: context keys are features of the sequence
itself, seen by a block up to its anchor. Products return the activations' dtype, because an f32
result would turn every bf16 product of the backward pass into an f32 one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.layers import apply_rope, rms_norm, rope_angles
from dflash_jax.params import LayerParams, TargetParams

Tensors = Mapping[str, jax.Array]  # weights of a drafter by checkpoint name, matrices [out, in]
CausalAttention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

MASKED = -1e30  # finite, so that a row without keys stays free of NaN


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x[..., in] @ w[out, in].T in x.dtype, here and in the gradient."""
    return jnp.einsum("...i,oi->...o", x, w, preferred_element_type=x.dtype)


def causal_attention(implementation: str) -> CausalAttention:
    """Attention of q[B, T, H, D] over k, v[B, T, K, D]: `xla` anywhere, `cudnn` on a GPU."""

    chosen: Any = implementation  # jax types it as one of its two literals

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=chosen)

    return attend


def best_attention(config: TargetConfig, dtype: jnp.dtype) -> str:
    """`cudnn` where a tiny call of it compiles and runs, else `xla`."""
    if jax.default_backend() != "gpu" or dtype not in (jnp.bfloat16, jnp.float16):
        return "xla"
    q = jnp.ones((1, 64, config.num_heads, config.head_dim), dtype)
    k = q[:, :, : config.num_kv_heads]
    try:
        jax.block_until_ready(jax.jit(causal_attention("cudnn"))(q, k, k))
    except Exception:  # what a missing or old cuDNN raises differs by version
        return "xla"
    return "cudnn"


def target_qkv(
    layer: LayerParams, x: jax.Array, cos: jax.Array, sin: jax.Array, config: TargetConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated q[N, H, D], rotated k[N, K, D] and v[N, K, D] of x[N, E]."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    qkv = linear(rms_norm(x, layer.input_norm, config.rms_eps), layer.qkv)
    if layer.qkv_bias is not None:
        qkv = qkv + layer.qkv_bias
    q, k, v = jnp.split(qkv, (heads * dim, (heads + kv_heads) * dim), axis=-1)
    q, k, v = (y.reshape(-1, y.shape[-1] // dim, dim) for y in (q, k, v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, config.rms_eps)
        k = rms_norm(k, layer.k_norm, config.rms_eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def target_tail(
    layer: LayerParams, x: jax.Array, attended: jax.Array, config: TargetConfig
) -> jax.Array:
    """The rest of a target layer: output projection, SwiGLU, both residuals; rows [N, .]."""
    y = linear(attended, layer.o)
    x = x + (y if layer.o_bias is None else y + layer.o_bias)
    gate, up = jnp.split(
        linear(rms_norm(x, layer.post_norm, config.rms_eps), layer.gate_up), 2, axis=-1
    )
    return x + linear(jax.nn.silu(gate) * up, layer.down)


def target_forward(
    params: TargetParams, tokens: jax.Array, taps: tuple[int, ...], attend: CausalAttention
) -> tuple[jax.Array, jax.Array]:
    """Run the target over whole sequences from position 0.

    Args:
      tokens: i32[B, T].
      taps: layers whose outputs are wanted, by layer-output id.
      attend: from `causal_attention`.

    Returns:
      features [B, T, M*E] and the final normed hidden [B, T, E].
    """
    config = params.config
    batch, length = tokens.shape
    cos, sin = rope_angles(jnp.arange(length), config.rope, config.head_dim, length)
    cos, sin = (jnp.tile(table, (batch, 1)) for table in (cos, sin))  # [B*T, D/2]
    x = params.embed[tokens.reshape(-1)]
    kept = {-1: x} if -1 in taps else {}
    if config.has_output_gate or config.moe is not None:
        raise NotImplementedError(
            f"training: a {config.model_type} target is not supported, wanted a dense one "
            "(qwen3, llama)"
        )
    for index, layer in enumerate(params.layers):
        q, k, v = (
            y.reshape(batch, length, *y.shape[1:]) for y in target_qkv(layer, x, cos, sin, config)
        )
        x = target_tail(layer, x, attend(q, k, v).reshape(batch * length, -1), config)
        if index in taps:
            kept[index] = x
    features = jnp.concatenate([x[:, :0], *(kept[i] for i in taps)], axis=-1)
    hidden = rms_norm(x, params.norm, config.rms_eps)
    return features.reshape(batch, length, features.shape[-1]), hidden.reshape(batch, length, -1)


@jax.custom_vjp
def attention_scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """f32 scores [B, K, G, N, S] of q[B, N, K, G, D] and k[B, S, K, D], gradients in q.dtype."""
    return jnp.einsum("bnkgd,bskd->bkgns", q, k, preferred_element_type=jnp.float32)


def _scores_fwd(q: jax.Array, k: jax.Array):
    return attention_scores(q, k), (q, k)


def _scores_bwd(saved, grad: jax.Array):
    q, k = saved
    grad = grad.astype(q.dtype)
    return (
        jnp.einsum("bkgns,bskd->bnkgd", grad, k, preferred_element_type=q.dtype),
        jnp.einsum("bkgns,bnkgd->bskd", grad, q, preferred_element_type=k.dtype),
    )


attention_scores.defvjp(_scores_fwd, _scores_bwd)


def _block_attention(
    q: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    k_context: jax.Array,
    v_context: jax.Array,
    anchors: jax.Array,
    is_causal: bool,
) -> jax.Array:
    """Each block row attends to the context before its anchor and to its own block.

    Args:
      q: [B, A, R, H, D]; k_block, v_block: [B, A, R, K, D]; k_context, v_context: [B, T, K, D].
      anchors: i32[B, A] absolute positions of the anchors.

    Returns:
      [B, A, R, H*D].
    """
    batch, num_anchors, rows, heads, dim = q.shape
    length, kv_heads = k_context.shape[1:3]
    flat = num_anchors * rows
    q = (q * dim**-0.5).reshape(batch, flat, kv_heads, heads // kv_heads, dim)
    seen = jnp.arange(length) < jnp.repeat(anchors, rows, axis=1)[..., None]  # [B, A*R, T]
    scores = attention_scores(q, k_context)  # [B, K, G, A*R, T]
    context = jnp.where(seen[:, None, None], scores, MASKED)
    block = attention_scores(  # each block is a sequence of its own: [B*A, K, G, R, R]
        q.reshape(batch * num_anchors, rows, *q.shape[2:]),
        k_block.reshape(batch * num_anchors, rows, kv_heads, dim),
    )
    if is_causal:
        block = jnp.where(jnp.tril(jnp.ones((rows, rows), bool)), block, MASKED)
    block = jnp.moveaxis(block.reshape(batch, num_anchors, *block.shape[1:]), 1, 3)
    block = block.reshape(*context.shape[:4], rows)  # [B, K, G, A*R, R]

    top = jnp.maximum(context.max(-1), block.max(-1))[..., None]
    top = jax.lax.stop_gradient(top)
    p_context, p_block = jnp.exp(context - top), jnp.exp(block - top)
    total = p_context.sum(-1) + p_block.sum(-1)  # [B, K, G, A*R]
    out = jnp.einsum(
        "bkgns,bskd->bnkgd", p_context.astype(q.dtype), v_context, preferred_element_type=q.dtype
    )
    p_block = p_block.reshape(*p_block.shape[:3], num_anchors, rows, rows)
    out_block = jnp.einsum(
        "bkgaij,bajkd->baikgd", p_block.astype(q.dtype), v_block, preferred_element_type=q.dtype
    )
    out = out + out_block.reshape(out.shape)
    out = out / jnp.moveaxis(total, 3, 1)[..., None].astype(q.dtype)
    return out.reshape(batch, num_anchors, rows, heads * dim)


def dynamic_conv(x: jax.Array, dynamic: jax.Array, base: jax.Array) -> jax.Array:
    """One side of the grouped dynamic convolution over the rows of a block.

    Args:
      x: [..., R, E]; dynamic: [..., R, taps, groups]; base: [taps, E].
    """
    width, groups = x.shape[-1], dynamic.shape[-1]
    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(base.shape[0]):
        pad = [(0, 0)] * (x.ndim - 2) + [(tap, 0), (0, 0)]
        shifted = jnp.pad(x, pad)[..., : x.shape[-2], :].astype(jnp.float32)
        weight = jnp.repeat(dynamic[..., tap, :].astype(jnp.float32), width // groups, axis=-1)
        out = out + (base[tap].astype(jnp.float32) + weight) * shifted
    return out.astype(x.dtype)


def _conv(
    tensors: Tensors, name: str, config: DraftConfig, x: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """(prepared rows, finish) of one conv module; both the identity where there is none."""
    if not config.conv_taps:
        return x, lambda y: y
    base = tensors[f"{name}.base_kernel"]
    dynamic = linear(x, tensors[f"{name}.kernel_projection.weight"])
    dynamic = dynamic.reshape(*x.shape[:-1], 2, config.conv_taps, config.num_conv_groups)
    prepared = dynamic_conv(x, dynamic[..., 0, :, :], base[0])
    return prepared, lambda y: dynamic_conv(y, dynamic[..., 1, :, :], base[1])


def context_rows(tensors: Tensors, config: DraftConfig, features: jax.Array) -> jax.Array:
    """features [B, T, M*E] -> the context rows [B, T, E] that every drafter layer reads."""
    return rms_norm(
        linear(features, tensors["fc.weight"]), tensors["hidden_norm.weight"], config.rms_eps
    )


def draft_hidden(
    tensors: Tensors,
    config: DraftConfig,
    embed: jax.Array,
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """Run the drafter's block forward at many anchors of each sequence.

    Args:
      tensors: the drafter's weights, in the compute dtype.
      embed: [V, E], the target's table.
      features: [B, T, M*E] of the target; a block sees those at positions below its anchor.
      tokens: i32[B, T]; row 0 of a block is the token at its anchor, the others are masks.
      anchors: i32[B, A] absolute positions.

    Returns:
      [B, A, R, E] after the final norm.
    """
    batch, num_anchors = anchors.shape
    rows, dim, eps = config.block_rows, config.head_dim, config.rms_eps
    length = features.shape[1]
    context = context_rows(tensors, config, features)
    ids = jnp.full((batch, num_anchors, rows), config.mask_id, jnp.int32)
    ids = ids.at[..., 0].set(jnp.take_along_axis(tokens, anchors, axis=1))
    x = embed[ids]  # [B, A, R, E]
    if config.input_embedding_scale != 1.0:
        x = x * jnp.asarray(config.input_embedding_scale, x.dtype)
    positions = (anchors[..., None] + jnp.arange(rows)).reshape(-1)
    block_rope = rope_angles(positions, config.rope, dim, length + rows)
    context_rope = rope_angles(jnp.arange(length), config.rope, dim, length + rows)
    context_rope = tuple(jnp.tile(table, (batch, 1)) for table in context_rope)

    def heads_of(y: jax.Array, norm: str | None, rope: tuple[jax.Array, ...] | None) -> jax.Array:
        lead = y.shape[:-1]
        y = y.reshape(-1, y.shape[-1] // dim, dim)
        if norm is not None:
            y = rms_norm(y, tensors[norm], eps)
        if rope is not None:
            y = apply_rope(y, rope[0], rope[1])
        return y.reshape(*lead, *y.shape[1:])

    for index in range(config.num_layers):
        at = f"layers.{index}"
        q_norm, k_norm = f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight"
        wq, wk, wv, wo = (tensors[f"{at}.self_attn.{n}_proj.weight"] for n in "qkvo")
        normed = rms_norm(x, tensors[f"{at}.input_layernorm.weight"], eps)
        normed, finish = _conv(tensors, f"{at}.attention_conv", config, normed)
        attended = _block_attention(
            heads_of(linear(normed, wq), q_norm, block_rope),
            heads_of(linear(normed, wk), k_norm, block_rope),
            heads_of(linear(normed, wv), None, None),
            heads_of(linear(context, wk), k_norm, context_rope),
            heads_of(linear(context, wv), None, None),
            anchors,
            config.attention[index].is_causal,
        )
        x = x + finish(linear(attended, wo))
        normed = rms_norm(x, tensors[f"{at}.post_attention_layernorm.weight"], eps)
        normed, finish = _conv(tensors, f"{at}.mlp_conv", config, normed)
        gate = linear(normed, tensors[f"{at}.mlp.gate_proj.weight"])
        up = linear(normed, tensors[f"{at}.mlp.up_proj.weight"])
        x = x + finish(linear(jax.nn.silu(gate) * up, tensors[f"{at}.mlp.down_proj.weight"]))
    return rms_norm(x, tensors["norm.weight"], eps)
