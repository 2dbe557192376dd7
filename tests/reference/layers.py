"""Layers that targets and drafters share, one sequence at a time (spec/drafters.md §3).

Letters: T or S rows, H query heads, K kv heads, D head dim, E width. A weight is `[out, in]` and
`y = x @ w.T`. Every function keeps the dtype of its input, so that a model runs in f64 or in f32.
"""

import math

import numpy as np


def linear(x, weights, name):
    """x[T, in] -> [T, out] by `{name}.weight`, plus `{name}.bias` where the checkpoint has one."""
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def rms_norm(x, weight, eps):
    """Divide by the root mean square over the last axis, then scale by `weight`."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    return weight * (x / np.sqrt(mean_square + x.dtype.type(eps)))


def silu(x):
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def swiglu(x, weights, prefix):
    """down(silu(gate(x)) * up(x)) with the tensors `{prefix}.{gate,up,down}_proj`."""
    gate = silu(linear(x, weights, f"{prefix}.gate_proj"))
    return linear(gate * linear(x, weights, f"{prefix}.up_proj"), weights, f"{prefix}.down_proj")


def softmax(scores):
    """Softmax over the last axis; masked entries are -inf and become exact zeros."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def argmax_lowest(x):
    """Argmax over the last axis; equal values go to the lowest index (numpy's own rule)."""
    return np.argmax(x, axis=-1)


def rope_frequencies(config, head_dim):
    """(inverse frequencies f64[D/2], attention factor) of a config's rope entry.

    Both layouts are read: `rope_parameters {rope_theta, rope_type, ...}` and the older `rope_theta`
    beside `rope_scaling {rope_type or type, ...}`.
    """
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = rope.get("rope_theta", config.get("rope_theta", 1e6))
    kind = rope.get("rope_type", rope.get("type", "default"))
    inverse = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3_frequencies(inverse, rope), 1.0
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
        return _yarn_frequencies(inverse, theta, head_dim, original, rope), _yarn_factor(rope)
    raise NotImplementedError(f"rope type {kind!r}: there are default, linear, llama3, yarn")


def _llama3_frequencies(inverse, rope):
    """Keep short wavelengths, stretch long ones by `factor`, blend those in between."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    scaled = []
    for frequency in inverse:
        turns = original * frequency / (2 * math.pi)  # full turns inside the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append(kept * frequency + (1 - kept) * frequency / factor)
    return np.array(scaled)


def _yarn_frequencies(inverse, theta, head_dim, original, rope):
    """spec/drafters.md §3.2: fast bands keep their frequency, slow ones are divided by `factor`."""

    def band_of(turns):  # the (fractional) band that makes `turns` turns in the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(band_of(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(band_of(rope.get("beta_slow", 1))), head_dim - 1)
    width = (high - low) or 0.001  # one band wide: a step, not a division by zero
    stretched = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return inverse / rope["factor"] * stretched + inverse * (1 - stretched)


def _yarn_factor(rope):
    """What cos and sin are multiplied by, so that q.k grows by its square."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    return 0.1 * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0


def rotate(x, positions, frequencies, attention_factor):
    """Rotate x[T, heads, D] at absolute `positions` [T]; pair (i, i + D/2) turns together."""
    angles = np.asarray(positions, np.float64)[:, None] * frequencies  # [T, D/2]
    cos = (np.cos(angles) * attention_factor).astype(x.dtype)[:, None, :]
    sin = (np.sin(angles) * attention_factor).astype(x.dtype)[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def visible(query_positions, key_positions, is_causal, window=None):
    """bool[T, S]: which keys each query may read, by absolute positions (spec/drafters.md §3.1).

    A window hides keys `window` or more positions behind the query, and, where attention is not
    causal, as many ahead of it.
    """
    behind = np.asarray(query_positions)[:, None] - np.asarray(key_positions)[None, :]
    allowed = np.ones(behind.shape, bool)
    if is_causal:
        allowed &= behind >= 0
    if window is not None:
        allowed &= behind < window
        if not is_causal:
            allowed &= -behind < window
    return allowed


def attention(q, k, v, allowed):
    """Grouped-query attention of q[T, H, D] over k, v[S, K, D] with `allowed` bool[T, S]."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)  # head h reads kv head h // G
    scores = np.einsum("tkgd,skd->kgts", grouped, k) / math.sqrt(head_dim)
    scores = np.where(allowed, scores, -np.inf)
    mixed = np.einsum("kgts,skd->tkgd", softmax(scores), v)
    return mixed.reshape(rows, heads * head_dim)
