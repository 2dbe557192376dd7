"""An MTP head over whole sequences: chains of drafts from many anchors at once.

A chain is what inference does from an anchor: its first row is the committed one before the anchor,
which reads the rows of all tokens up to it; each further row takes the row before it and one token
more, and reads those committed rows and its own chain. Training feeds the text's tokens, measuring
the head's own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dflash_jax.layers import apply_rope, rms_norm, rope_angles
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.train.dense import MASKED, Tensors, attention_scores, linear

_AT = "mtp.layers.0."
NextTokens = Callable[[int, jax.Array], jax.Array]  # (row, output [B, A, E]) -> i32[B, A]


def chain_rows(
    tensors: Tensors,
    config: MtpConfig,
    embed: jax.Array,
    hidden: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
    next_tokens: NextTokens,
) -> jax.Array:
    """Run chains of `config.max_drafts` rows.

    Args:
      tensors: the head's weights, in the compute dtype.
      embed: [V, E], the target's table.
      hidden: [B, T, E] of the target after its final norm.
      tokens: i32[B, T].
      anchors: i32[B, A] absolute positions from 1 on.
      next_tokens: the token that the row after row j reads, once row j's output is known.

    Returns:
      [B, A, J, E] outputs after the head's norm; row j says what stands at anchor + j + 1.
    """
    layer = config.layer
    context_k, context_v = _context(tensors, config, embed, hidden, tokens)
    before = jnp.maximum(anchors - 1, 0)
    row = jnp.take_along_axis(hidden, before[..., None], axis=1)  # [B, A, E]
    token = jnp.take_along_axis(tokens, jnp.maximum(anchors, 0), axis=1)
    reach = hidden.shape[1] + config.max_drafts
    chain_k, chain_v, outs = [], [], []
    for j in range(config.max_drafts):
        x = _join(tensors, config, embed[token], row)
        normed = rms_norm(x, tensors[f"{_AT}input_layernorm.weight"], layer.rms_eps)
        angles = rope_angles((before + j).reshape(-1), layer.rope, layer.head_dim, reach)
        q, k, v = _heads(tensors, config, normed, angles)
        if j:  # the first row is among the context
            chain_k.append(k)
            chain_v.append(v)
        attended = _attend(q, context_k, context_v, chain_k, chain_v, anchors)
        x = x + linear(attended, tensors[f"{_AT}self_attn.o_proj.weight"])
        normed = rms_norm(x, tensors[f"{_AT}post_attention_layernorm.weight"], layer.rms_eps)
        gate = linear(normed, tensors[f"{_AT}mlp.gate_proj.weight"])
        up = linear(normed, tensors[f"{_AT}mlp.up_proj.weight"])
        x = x + linear(jax.nn.silu(gate) * up, tensors[f"{_AT}mlp.down_proj.weight"])
        row = rms_norm(x, tensors["mtp.norm.weight"], layer.rms_eps)
        outs.append(row)
        if j + 1 < config.max_drafts:
            token = next_tokens(j, row)
    return jnp.stack(outs, axis=2)


def _join(tensors: Tensors, config: MtpConfig, embedded: jax.Array, hidden: jax.Array) -> jax.Array:
    eps = config.layer.rms_eps
    parts = [
        rms_norm(embedded, tensors["mtp.pre_fc_norm_embedding.weight"], eps),
        rms_norm(hidden, tensors["mtp.pre_fc_norm_hidden.weight"], eps),
    ]
    return linear(jnp.concatenate(parts, axis=-1), tensors["mtp.fc.weight"])


def _heads(
    tensors: Tensors, config: MtpConfig, x: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated q, rotated k and v of x[..., E]: [..., heads, D]."""
    lead, dim = x.shape[:-1], config.layer.head_dim

    def project(which: str, is_rotated: bool) -> jax.Array:
        y = linear(x, tensors[f"{_AT}self_attn.{which}_proj.weight"])
        y = y.reshape(-1, y.shape[-1] // dim, dim)
        norm = tensors.get(f"{_AT}self_attn.{which}_norm.weight")
        if norm is not None:
            y = rms_norm(y, norm, config.layer.rms_eps)
        if is_rotated:
            y = apply_rope(y, *angles)
        return y.reshape(*lead, *y.shape[1:])

    return project("q", True), project("k", True), project("v", False)


def _context(
    tensors: Tensors, config: MtpConfig, embed: jax.Array, hidden: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, T, K, D] of every token's row; the last one's next token is unknown."""
    batch, length, _ = hidden.shape
    layer = config.layer
    x = _join(tensors, config, embed[jnp.roll(tokens, -1, axis=1)], hidden)
    normed = rms_norm(x, tensors[f"{_AT}input_layernorm.weight"], layer.rms_eps)
    positions = jnp.tile(jnp.arange(length), batch)
    angles = rope_angles(positions, layer.rope, layer.head_dim, length)
    _, k, v = _heads(tensors, config, normed, angles)
    return k, v


def _attend(
    q: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    chain_k: list[jax.Array],
    chain_v: list[jax.Array],
    anchors: jax.Array,
) -> jax.Array:
    """q[B, A, H, D] over context rows below its anchor and rows [B, A, K, D] of its own chain."""
    batch, num_anchors, heads, dim = q.shape
    length, kv_heads = context_k.shape[1:3]
    q = (q * dim**-0.5).reshape(batch, num_anchors, kv_heads, heads // kv_heads, dim)
    seen = jnp.arange(length) < anchors[..., None]  # [B, A, T]
    context = jnp.where(seen[:, None, None], attention_scores(q, context_k), MASKED)
    scores = [context]  # [B, K, G, A, ...]
    if chain_k:
        keys = jnp.stack(chain_k, axis=2)  # [B, A, J, K, D]
        own = jnp.einsum("bakgd,bajkd->bkgaj", q, keys, preferred_element_type=q.dtype)
        scores.append(own.astype(jnp.float32))
    p = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum(
        "bkgas,bskd->bakgd", p[..., :length], context_v, preferred_element_type=q.dtype
    )
    if chain_v:
        values = jnp.stack(chain_v, axis=2)
        out = out + jnp.einsum(
            "bkgaj,bajkd->bakgd", p[..., length:], values, preferred_element_type=q.dtype
        )
    return out.reshape(batch, num_anchors, heads * dim)
