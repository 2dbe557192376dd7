"""Mixture of experts as two plain products over all experts side by side.

A row's inner columns of experts that it did not choose are set to zero between them. A step has few
rows but many choices (16 rows of 8 experts in 256 already touch 40 % of them), so reading every
expert once costs less than gathering copies of the chosen ones, which would be written to memory
and read again; and a row's sum runs over all columns in one order, whoever shares its batch.
A long prefill pays for it: all experts' arithmetic for every row.
"""

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as pk
from dflash_jax.config import MoeConfig
from dflash_jax.layers import linear, swiglu
from dflash_jax.params import LayerParams


def expert_shares(x: jax.Array, router: jax.Array, c: MoeConfig, *, impl: str) -> jax.Array:
    """f32[N, experts] share of each expert in a row's sum, zero for those it did not choose.

    Softmax over all experts in f32; of equal ones the lowest numbers are chosen.
    """
    logits = pk.skinny_matmul(x, router, out_dtype=jnp.float32, impl=impl)
    probabilities = jax.nn.softmax(logits, axis=-1)
    best, chosen = lax.top_k(probabilities, c.top_k)  # of equal ones the first
    if c.renormalises:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros_like(probabilities).at[row, chosen].set(best, unique_indices=True)


def mixture(layer: LayerParams, x: jax.Array, c: MoeConfig, *, impl: str) -> jax.Array:
    """The feed-forward of a layer with experts: x[N, E] -> [N, E]."""
    shares = expert_shares(x, layer.router, c, impl=impl)
    inner = swiglu(x, layer.gate_up, impl=impl)  # [N, F], all experts
    weights = jnp.repeat(shares, c.ffn, axis=1)
    if layer.shared_gate is not None:
        gate = pk.skinny_matmul(x, layer.shared_gate, out_dtype=jnp.float32, impl=impl)
        shared = jnp.broadcast_to(jax.nn.sigmoid(gate), (x.shape[0], c.shared_ffn))
        weights = jnp.concatenate([weights, shared], axis=1)
    # An expert that was not chosen may overflow, and 0 * inf is NaN.
    weighted = jnp.where(weights > 0, inner.astype(jnp.float32) * weights, jnp.zeros_like(weights))
    return linear(weighted.astype(x.dtype), layer.down, impl=impl)
