"""Norm, rope, linear and embedding against float64. About 8 CPU seconds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import layers
from dflash_jax.config import RopeConfig
from tests.reference import layers as reference

pytestmark = pytest.mark.usefixtures("strict_dtypes")

ROPES = {
    "default": {"rope_theta": 1e6},
    "default-10000": {"rope_theta": 1e4},
    "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "yarn": {
        "rope_parameters": {
            "rope_theta": 1e6,
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        }
    },
}
FAR = np.array([0, 1, 255, 256, 257, 4097, 65537, 131071], np.int32)
every_rope = pytest.mark.parametrize("name", ROPES)


def rope_of(name):
    raw = {"max_position_embeddings": 131072, **ROPES[name]}
    return raw, RopeConfig.from_hf(raw, default_theta=1e4, who="test")


@every_rope
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_angles_are_those_of_float64_at_any_position(name, head_dim):
    """Known fault B34: f32 positions times f32 frequencies are 3e-3 off at the last one."""
    raw, rope = rope_of(name)
    frequencies, factor = reference.rope_frequencies(raw, head_dim)
    np.testing.assert_allclose(layers.rope_frequencies(rope, head_dim), frequencies, rtol=1e-12)
    cos, sin = layers.rope_angles(jnp.asarray(FAR), rope, head_dim, 131072)
    angles = FAR[:, None].astype(np.float64) * frequencies
    assert cos.dtype == sin.dtype == jnp.float32
    # Two roundings of tables and three of products and sums, a few 1e-7 each.
    np.testing.assert_allclose(cos, np.cos(angles) * factor, rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, rtol=0, atol=1e-6)


@every_rope
def test_rotated_rows_are_those_of_float64(name):
    raw, rope = rope_of(name)
    x = np.random.default_rng(0).standard_normal((len(FAR), 3, 64)).astype(np.float32)
    want = reference.rotate(x.astype(np.float64), FAR, *reference.rope_frequencies(raw, 64))
    angles = layers.rope_angles(jnp.asarray(FAR), rope, 64, 131072)
    np.testing.assert_allclose(layers.apply_rope(jnp.asarray(x), *angles), want, rtol=0, atol=1e-5)
    halves = layers.apply_rope(jnp.asarray(x, jnp.bfloat16), *angles)
    assert halves.dtype == jnp.bfloat16
    exact = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    want = reference.rotate(exact, FAR, *reference.rope_frequencies(raw, 64))
    # One rounding to 8 bits at the end, none on the way.
    np.testing.assert_allclose(np.asarray(halves, np.float64), want, rtol=2**-8, atol=1e-5)


def test_a_row_is_rotated_alike_wherever_it_stands():
    _, rope = rope_of("llama3")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 2, 32)), jnp.float32)
    rotate = jax.jit(lambda x, p: layers.apply_rope(x, *layers.rope_angles(p, rope, 32, 131072)))
    order = np.random.default_rng(2).permutation(8)
    want = np.asarray(rotate(x, jnp.asarray(FAR)))[order]
    np.testing.assert_array_equal(rotate(x[order], jnp.asarray(FAR[order])), want)


@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 16)], ids=str)
def test_rms_norm_is_that_of_float64(shape):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape), rng.standard_normal(shape[-1])
    x[0], x[1] = 1e-6, 3e15  # eps decides the first; the square of the second needs a wide range
    got = layers.rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), 1e-6)
    np.testing.assert_allclose(got, reference.rms_norm(x, weight, 1e-6), rtol=2e-6, atol=1e-9)


def test_rms_norm_in_bf16_rounds_before_the_weight_and_sums_in_f32():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((7, 512)) * 50, jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(512), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6)
    want = jnp.asarray(normed, jnp.bfloat16) * weight[None]
    got = layers.rms_norm(x, weight, 1e-6)
    assert got.dtype == jnp.bfloat16
    # f32 and f64 statistics may round a value to different neighbours, rarely.
    assert (np.asarray(got) != np.asarray(want)).mean() < 0.01
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=2**-7
    )


def test_linear_adds_its_bias_in_the_dtype_of_the_rows():
    rng = np.random.default_rng(2)
    x, weight, bias = (rng.standard_normal(shape) for shape in ((4, 32), (8, 32), (8,)))
    got = layers.linear(*(jnp.asarray(a, jnp.float32) for a in (x, weight, bias)))
    np.testing.assert_allclose(got, x @ weight.T + bias, rtol=0, atol=1e-5)
    narrow = layers.linear(*(jnp.asarray(a, jnp.bfloat16) for a in (x, weight, bias)))
    assert narrow.dtype == jnp.bfloat16


def test_logits_of_bf16_rows_are_not_rounded_to_bf16():
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((4, 64)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((307, 64)), jnp.bfloat16)
    got = layers.logits_of(x, head)
    assert got.dtype == jnp.float32
    want = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_embedding_takes_rows_scales_them_and_gives_zeros_for_no_token():
    table = jnp.asarray(np.random.default_rng(4).standard_normal((9, 4)), jnp.bfloat16)
    rows = layers.embed(jnp.array([0, 8, 9, 100], jnp.int32), table)
    np.testing.assert_array_equal(rows[:2], table[np.array([0, 8])])
    assert not np.asarray(rows[2:]).any()
    scaled = layers.embed(jnp.array([3], jnp.int32), table, 2.0)
    np.testing.assert_array_equal(scaled[0], table[3] * jnp.bfloat16(2))
    assert scaled.dtype == jnp.bfloat16
