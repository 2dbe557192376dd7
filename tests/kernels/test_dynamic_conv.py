"""dynamic_conv: against the oracle, and that nothing crosses a block or a group."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests import cases
from tests.cases import ConvCase
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")

conv = jax.jit(pk.dynamic_conv)


@pytest.mark.parametrize("case", cases.CONV, ids=lambda case: case.name)
def test_every_case_equals_the_oracle(case):
    inputs = cases.make_conv(case)
    got = conv(*inputs)
    assert got.dtype == inputs[0].dtype
    assert_close(got, ops.dynamic_conv(*inputs))


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


def test_a_row_keeps_its_bits_in_another_batch_row_and_block_place():
    case = ConvCase("rows", 3, 6, 32, 2, 2, dtype="f32")
    x, dyn, base = cases.make_conv(case)
    want = np.asarray(conv(x, dyn, base))
    order = np.array([2, 0, 1])
    assert_same_bits(conv(x[order], dyn[order], base), want[order])
    moved = np.asarray(conv(np.roll(x, 1, 1), np.roll(dyn, 1, 1), base))
    assert_same_bits(moved[:, 2:], want[:, 1:-1])


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
    ],
    ids=["rank", "dtype", "rows", "taps", "groups", "too_many_taps"],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.dynamic_conv(**{**GOOD, **bad})
    assert str(error.value).startswith("dynamic_conv: ")
