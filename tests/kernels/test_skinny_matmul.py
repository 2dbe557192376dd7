"""skinny_matmul and its SwiGLU form: against the oracles, rounding order, and bits of a row."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests import cases
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@jax.jit
def all_forms(x, w, residual):
    return (
        pk.skinny_matmul(x, w),
        pk.skinny_matmul(x, w, residual=residual),
        pk.skinny_matmul(x, w, out_dtype=jnp.float32),
        pk.skinny_matmul_swiglu(x, w),
    )


@pytest.mark.parametrize("case", cases.MATMUL, ids=lambda case: case.name)
def test_every_case_equals_the_oracle(case):
    x, w, residual = cases.make_matmul(case)
    plain, added, wide, swiglu = all_forms(x, w, residual)
    assert plain.dtype == added.dtype == swiglu.dtype == x.dtype
    assert wide.dtype == np.float32
    assert_close(plain, ops.skinny_matmul(x, w))
    assert_close(added, ops.skinny_matmul(x, w, residual=residual))
    assert_close(wide, ops.skinny_matmul(x, w, out_dtype=np.float32))
    assert_close(swiglu, ops.skinny_matmul_swiglu(x, w))


@pytest.mark.parametrize("case", cases.MATMUL, ids=lambda case: case.name)
def test_a_row_keeps_its_bits_in_another_place_and_among_other_rows(case):
    x, w, residual = cases.make_matmul(case)
    want = [np.asarray(y) for y in all_forms(x, w, residual)]
    order = np.random.default_rng(1).permutation(case.rows)
    others = x.copy()
    others[1:] = -3
    for got, before in zip(all_forms(x[order], w, residual[order]), want, strict=True):
        assert_same_bits(got, before[order])
    for got, before in zip(all_forms(others, w, residual), want, strict=True):
        assert_same_bits(np.asarray(got)[0], before[0])


def test_the_product_is_rounded_before_the_residual_is_added():
    # 257 is no bf16 number: it rounds to 256, and 256 - 256 = 0, where one rounding would leave 1.
    bf16 = cases.DTYPES["bf16"]
    x = np.array([[256, 1]], bf16)
    w = np.ones((4, 2), bf16)
    residual = np.full((1, 4), -256, bf16)
    got = pk.skinny_matmul(x, w, residual=residual)
    assert (np.asarray(got, np.float32) == 0).all()
    assert (np.asarray(pk.skinny_matmul(x, w, out_dtype=jnp.float32)) == 257).all()


def test_swiglu_rounds_gate_up_silu_and_product_as_the_oracle_does():
    # Integer sums are exact in any order, so that every rounding must fall in the same place.
    rng = np.random.default_rng(0)
    bf16 = cases.DTYPES["bf16"]
    x = rng.integers(-4, 5, (7, 24)).astype(bf16)
    w = rng.integers(-4, 5, (64, 24)).astype(bf16)
    got = np.asarray(pk.skinny_matmul_swiglu(x, w))
    assert_same_bits(got, ops.skinny_matmul_swiglu(x, w))


def test_sums_are_f32_for_bf16_operands():
    # Sums held in bf16 would stop growing at 256.
    ones = np.ones((2, 4096), cases.DTYPES["bf16"])
    got = pk.skinny_matmul(ones, ones, out_dtype=jnp.float32)
    assert (np.asarray(got) == 4096).all()


def test_vmap_over_weights_equals_a_loop_over_them():
    x, w, _ = cases.make_matmul(cases.MATMUL[1])
    stacked = np.stack([w, 2 * w])
    got = jax.jit(jax.vmap(partial(pk.skinny_matmul, x)))(stacked)
    assert_close(got, np.stack([ops.skinny_matmul(x, w), ops.skinny_matmul(x, 2 * w)]))


GOOD = {"x": jnp.zeros((5, 48), jnp.bfloat16), "w": jnp.zeros((6, 48), jnp.bfloat16)}
ROWS = jnp.zeros((5, 6), jnp.bfloat16)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"x": jnp.zeros((1, 5, 48), jnp.bfloat16)}, "x is bf16[1, 5, 48], wanted [N, in]"),
        ({"w": jnp.zeros((48, 6), jnp.bfloat16)}, "w is bf16[48, 6], wanted shape [48, 48]"),
        ({"w": jnp.zeros((6, 48), jnp.float32)}, "w is float32, wanted bfloat16 as x"),
        ({"residual": ROWS[:4]}, "residual is bf16[4, 6], wanted shape [5, 6]"),
        (
            {"residual": ROWS.astype(jnp.float32)},
            "residual is float32 and out_dtype bfloat16, wanted both bfloat16",
        ),
        (
            {"residual": ROWS, "out_dtype": jnp.float32},
            "residual is bfloat16 and out_dtype float32, wanted both bfloat16",
        ),
    ],
    ids=["rank", "transposed", "dtype", "residual", "residual_dtype", "residual_and_out_dtype"],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.skinny_matmul(**{**GOOD, **bad})
    assert str(error.value).startswith("skinny_matmul: ")


def test_an_odd_gate_up_weight_is_refused():
    with pytest.raises(ValueError, match="skinny_matmul_swiglu: w_gate_up has 7 rows"):
        pk.skinny_matmul_swiglu(GOOD["x"], jnp.zeros((7, 48), jnp.bfloat16))
