"""Gated DeltaNet: the delta rule row by row, and the layer around it (spec/verify.md §3).

One sequence at a time. T rows, Hk key heads, Hv value heads, Dk and Dv their dims; value head h
reads key head h // (Hv / Hk). The state S is [Hv, Dk, Dv].
"""

from typing import NamedTuple

import numpy as np

from tests.reference import layers

NORM_EPS = 1e-6  # inside the root, beside the sum of squares


def l2_normalised(x):
    """x over its length along the last axis: the sum of squares, not their mean."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + x.dtype.type(NORM_EPS))


def delta_rule(q, k, v, g, beta, state, *, normalise=True):
    """Run rows one after another.

    Args:
      q, k: [T, Hk, Dk]; v: [T, Hv, Dv].
      g: [T, Hv] logarithm of the decay; beta: [T, Hv] strength of the write.
      state: [Hv, Dk, Dv] before the first row.
      normalise: whether q and k are brought to length one.
    Returns:
      out [T, Hv, Dv], and the state after each row [T, Hv, Dk, Dv].
    """
    if normalise:
        q, k = l2_normalised(q), l2_normalised(k)
    share = v.shape[1] // k.shape[1]
    q = np.repeat(q, share, axis=1) / np.sqrt(q.dtype.type(q.shape[-1]))
    k = np.repeat(k, share, axis=1)
    out, states = np.zeros_like(v), []
    for t in range(len(q)):
        state = np.exp(g[t])[:, None, None] * state
        correction = v[t] - np.einsum("hk,hkv->hv", k[t], state)
        state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * correction)
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
        states.append(state)
    return out, np.array(states).reshape(len(q), *state.shape)


def causal_conv(rows, weight):
    """Depthwise convolution of rows [T, C] by weight [C, taps], then silu.

    The last tap meets the row itself; before the first row there are zeros.
    """
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, rows.shape[1]), rows.dtype), rows])
    mixed = sum(padded[j : j + len(rows)] * weight[:, j] for j in range(taps))
    return layers.silu(mixed)


class GdnTrace(NamedTuple):
    """What one layer leaves behind."""

    pre_conv: np.ndarray  # [T, C] rows that enter the convolution
    states: np.ndarray  # [T, Hv, Dk, Dv] after each row


def gdn_layer(x, weights, prefix, config):
    """x[T, E] after the input norm -> what the layer adds to the stream, and a GdnTrace."""
    rows, eps = len(x), config["rms_norm_eps"]
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    pre_conv, z, b, a = project(x, weights, prefix, config)
    mixed = causal_conv(pre_conv, weights[f"{prefix}.conv1d.weight"][:, 0])
    q, k, v = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (y.reshape(rows, key_heads, key_dim) for y in (q, k))
    v = v.reshape(rows, value_heads, value_dim)
    decay = np.exp(weights[f"{prefix}.A_log"])
    g = -decay * np.logaddexp(0, a + weights[f"{prefix}.dt_bias"])
    beta = 1 / (1 + np.exp(-b))
    state = np.zeros((value_heads, key_dim, value_dim), x.dtype)
    out, states = delta_rule(q, k, v, g, beta, state)
    normed = layers.rms_norm(out, weights[f"{prefix}.norm.weight"], eps)
    gated = normed * layers.silu(z.reshape(out.shape))
    y = layers.linear(gated.reshape(rows, -1), weights, f"{prefix}.out_proj")
    return y, GdnTrace(pre_conv, states)


def project(x, weights, prefix, config):
    """(pre-convolution rows [T, C], z [T, Hv*Dv], b [T, Hv], a [T, Hv]) of either family.

    Qwen3.5 stores four projections. Qwen3-Next stores two, whose rows are grouped by key head:
    (q, k, v, z) and (b, a), each with the value heads of that key head.
    """
    if f"{prefix}.in_proj_qkv.weight" in weights:
        names = (f"{prefix}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
        return tuple(layers.linear(x, weights, name) for name in names)
    rows, key_heads = len(x), config["linear_num_key_heads"]
    share = config["linear_num_value_heads"] // key_heads
    key_dim, values = config["linear_key_head_dim"], share * config["linear_value_head_dim"]
    grouped = layers.linear(x, weights, f"{prefix}.in_proj_qkvz").reshape(rows, key_heads, -1)
    parts = np.split(grouped, [key_dim, 2 * key_dim, 2 * key_dim + values], axis=2)
    q, k, v, z = (part.reshape(rows, -1) for part in parts)
    gates = layers.linear(x, weights, f"{prefix}.in_proj_ba").reshape(rows, key_heads, 2, share)
    b, a = (gates[:, :, i].reshape(rows, -1) for i in (0, 1))
    return np.concatenate([q, k, v], axis=1), z, b, a
