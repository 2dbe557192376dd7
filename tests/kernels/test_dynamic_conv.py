"""dynamic_conv: against the oracle, and that nothing crosses a block or a group."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.dynamic_conv import DynamicConvConfig
from tests import cases
from tests.cases import ConvCase
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")

each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])


@cache
def convolve(impl="auto", side=None):
    return jax.jit(partial(pk.dynamic_conv, impl=impl, side=side, eps=1e-5))


conv = convolve()


@each_impl
@pytest.mark.parametrize("case", cases.CONV, ids=lambda case: case.name)
def test_every_case_equals_the_oracle(case, impl):
    inputs = cases.make_conv(case)
    got = convolve(impl)(*inputs)
    assert got.dtype == inputs[0].dtype
    assert_close(got, ops.dynamic_conv(*inputs))


@each_impl
@pytest.mark.parametrize("name", ["odd_groups", "drafter"])
def test_a_norm_before_and_a_residual_after_equal_the_oracles_steps(name, impl):
    (case,) = (case for case in cases.CONV if case.name == name)
    x, dyn, base, norm, residual = cases.make_conv_sides(case)
    y, total = convolve(impl, 1)(x, dyn, base, norm=norm, residual=residual)
    assert (y.dtype, total.dtype) == (x.dtype, x.dtype)
    want = ops.dynamic_conv(x, dyn, base, norm, residual, side=1, eps=1e-5)
    assert_close(y, want[0])
    assert_close(total, want[1])
    y, total = convolve(impl, 0)(x, dyn, base, residual=residual)
    assert_close(y, ops.dynamic_conv(x, dyn[:, :, 0], base[0]))
    assert_close(total, np.asarray(y) + residual)


@each_impl
def test_a_norm_reaches_no_row_of_another_block(impl):
    """Row 0 has no predecessor: its second tap sees zeros, not the normed last row before it."""
    x, dyn, base, norm, _ = cases.make_conv_sides(ConvCase("edge", 3, 8, 64, 2, 4, dtype="f32"))
    x[:, -1] = np.nan
    y = np.asarray(convolve(impl, 0)(x, dyn, base, norm=norm))
    assert np.isfinite(y[:, :-1]).all()


DELAY = ConvCase("delay", 3, 6, 32, 2, 2)


def test_a_one_step_delay_starts_anew_in_every_batch_row():
    x, dyn, base = cases.make_conv(DELAY)
    base[0], base[1] = 0, 1
    y = np.asarray(conv(x, np.zeros_like(dyn), base))
    assert_same_bits(y[:, 1:], x[:, :-1])
    assert (y[:, 0] == 0).all()


def test_an_untrained_conv_is_the_identity():
    x, dyn, base = cases.make_conv(DELAY)
    base[0], base[1] = 1, 0
    assert_same_bits(conv(x, np.zeros_like(dyn), base), x)


def test_a_group_correction_reaches_only_its_own_channels():
    x, dyn, base = cases.make_conv(DELAY)
    before = np.asarray(conv(x, dyn, base))
    changed = dyn.copy()
    changed[1, 3, :, 1] += 1
    moved = np.asarray(conv(x, changed, base)) != before
    assert moved[1, 3, 16:].all()
    moved[1, 3, 16:] = False
    assert not moved.any()


def test_the_sum_is_rounded_once():
    # bf16 holds every fourth number here: 3 * 257 = 771 rounds to 772, but 257 alone to 256.
    bf16 = cases.DTYPES["bf16"]
    got = conv(np.ones((1, 3, 16), bf16), np.ones((1, 3, 3, 1), bf16), np.full((3, 16), 256, bf16))
    assert (np.asarray(got, np.float32)[0, 2] == 772).all()


@each_impl
def test_a_row_keeps_its_bits_in_another_batch_row_and_block_place(impl):
    x, dyn, base = cases.make_conv(cases.CONV[1])
    want = np.asarray(convolve(impl)(x, dyn, base))
    order = np.array([2, 0, 1])
    assert_same_bits(convolve(impl)(x[order], dyn[order], base), want[order])
    moved = np.asarray(convolve(impl)(np.roll(x, 1, 1), np.roll(dyn, 1, 1), base))
    assert_same_bits(moved[:, 2:], want[:, 1:-1])


def test_no_tile_of_channels_changes_a_bit():
    inputs = cases.make_conv(cases.CONV[1])
    config = DynamicConvConfig(block_e=16, num_warps=1)
    got = jax.jit(partial(pk.dynamic_conv, impl="interpret", config=config))(*inputs)
    assert_same_bits(got, convolve("interpret")(*inputs))


def test_vmap_equals_a_batch():
    x, dyn, base = cases.make_conv(ConvCase("vmap", 3, 6, 32, 2, 2, dtype="f32"))
    one = lambda x, dyn: pk.dynamic_conv(x[None], dyn[None], base)[0]
    assert_close(jax.jit(jax.vmap(one))(x, dyn), ops.dynamic_conv(x, dyn, base))


GOOD = {
    "x": jnp.zeros((2, 5, 48), jnp.bfloat16),
    "dyn": jnp.zeros((2, 5, 2, 3), jnp.bfloat16),
    "base": jnp.zeros((2, 48), jnp.bfloat16),
}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"x": jnp.zeros((10, 48), jnp.bfloat16)}, "x is bf16[10, 48], wanted [B, R, E]"),
        ({"x": jnp.zeros((2, 5, 48), jnp.int8)}, "x is i8[2, 5, 48], wanted one of"),
        ({"dyn": jnp.zeros((2, 4, 2, 3), jnp.bfloat16)}, "dyn is bf16[2, 4, 2, 3], wanted shape"),
        ({"base": jnp.zeros((3, 48), jnp.bfloat16)}, "base is bf16[3, 48], wanted shape [2, 48]"),
        (
            {"dyn": jnp.zeros((2, 5, 2, 5), jnp.bfloat16)},
            "x has 48 channels, not a multiple of the 5 groups",
        ),
        (
            {"dyn": jnp.zeros((2, 5, 5, 3)), "base": jnp.zeros((5, 48))},
            "dyn has 5 taps, wanted 1 to 4",
        ),
        ({"side": 0}, "base is bf16[2, 48], wanted [S, T, E]"),
        (
            {
                "side": 2,
                "dyn": jnp.zeros((2, 5, 2, 2, 3)),
                "base": jnp.zeros((2, 2, 48)),
            },
            "side is 2, wanted 0 to 1",
        ),
        ({"norm": jnp.zeros(48)}, "norm is f32[48], wanted dtype bfloat16"),
        ({"residual": jnp.zeros((10, 48))}, "residual is f32[10, 48], wanted shape [2, 5, 48]"),
    ],
    ids=[
        "rank",
        "dtype",
        "rows",
        "taps",
        "groups",
        "too_many_taps",
        "no_sides",
        "side",
        "norm",
        "residual",
    ],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.dynamic_conv(**{**GOOD, **bad})
    assert str(error.value).startswith("dynamic_conv: ")


def test_rows_too_wide_to_be_normed_are_refused_and_go_to_xla_by_auto():
    x, dyn, base = jnp.zeros((1, 2, 8208)), jnp.zeros((1, 2, 1, 3)), jnp.zeros((1, 8208))
    call = partial(pk.dynamic_conv, x, dyn, base, norm=jnp.ones(8208))
    with pytest.raises(NotImplementedError, match="normalises 8208 channels, only up to 8192"):
        call(impl="interpret")
    assert jax.eval_shape(call).shape == (1, 2, 8208)
