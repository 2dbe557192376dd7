"""skinny_matmul and its SwiGLU form: against the oracles, rounding order, and bits of a row.

The kernel runs in Pallas' interpreter; the same tests hold the XLA form.
"""

import re
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._skinny_tiles import TUNED, rows_in_block, stages_that_fit, tiles_for
from tests import cases
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops
from tests.reference.layers import rms_norm

pytestmark = pytest.mark.usefixtures("strict_dtypes")


# Small enough that the cases have several tiles on each axis; its two parts are added in order.
SPLIT = pk.SkinnyMatmulConfig(block_n=32, block_k=32, split_k=2)
FORMS = {
    "xla": {"impl": "xla"},
    "kernel": {"impl": "interpret"},
    "split": {"impl": "interpret", "config": SPLIT},
}
each_form = pytest.mark.parametrize("form", FORMS)
each_case_in_each_form = pytest.mark.parametrize(
    ("case", "form"),
    [
        pytest.param(case, form, id=f"{case.name}-{form}")
        for number, case in enumerate(cases.MATMUL)
        for form in FORMS
        if form != "split" or number in (1, 2)  # one ragged, one whole: compiling takes the time
    ],
)


@cache
def all_forms(form):
    matmul = partial(pk.skinny_matmul, **FORMS[form])
    swiglu = partial(pk.skinny_matmul_swiglu, **FORMS[form])
    return jax.jit(
        lambda x, w, residual: (
            matmul(x, w),
            matmul(x, w, residual=residual),
            matmul(x, w, out_dtype=jnp.float32),
            swiglu(x, w),
            matmul(x, w, norm=_norm_weight(x), eps=EPS, residual=residual),
            swiglu(x, w, norm=_norm_weight(x), eps=EPS),
        )
    )


EPS = 0.25  # large, so that it counts


def _norm_weight(x):
    return jnp.linspace(0.5, 2.0, x.shape[1]).astype(x.dtype)


def normed(x):
    rounded = rms_norm(x.astype(np.float64), 1.0, EPS).astype(x.dtype)
    return rounded * np.asarray(_norm_weight(x))


@each_case_in_each_form
def test_every_case_equals_the_oracle(case, form):
    x, w, residual = cases.make_matmul(case)
    plain, added, wide, swiglu, norm_added, norm_swiglu = all_forms(form)(x, w, residual)
    assert plain.dtype == added.dtype == swiglu.dtype == x.dtype
    assert wide.dtype == np.float32
    assert_close(plain, ops.skinny_matmul(x, w))
    assert_close(added, ops.skinny_matmul(x, w, residual=residual))
    assert_close(wide, ops.skinny_matmul(x, w, out_dtype=np.float32))
    assert_close(swiglu, ops.skinny_matmul_swiglu(x, w))
    assert_close(norm_added, ops.skinny_matmul(normed(x), w, residual=residual))
    assert_close(norm_swiglu, ops.skinny_matmul_swiglu(normed(x), w))


@each_case_in_each_form
def test_a_row_keeps_its_bits_in_another_place_and_among_other_rows(case, form):
    run = all_forms(form)
    x, w, residual = cases.make_matmul(case)
    want = [np.asarray(y) for y in run(x, w, residual)]
    order = np.random.default_rng(1).permutation(case.rows)
    others = x.copy()
    others[1:] = -3
    for got, before in zip(run(x[order], w, residual[order]), want, strict=True):
        assert_same_bits(got, before[order])
    for got, before in zip(run(others, w, residual), want, strict=True):
        assert_same_bits(np.asarray(got)[0], before[0])


@each_form
def test_the_product_is_rounded_before_the_residual_is_added(form):
    # 257 is no bf16 number: it rounds to 256, and 256 - 256 = 0, where one rounding would leave 1.
    bf16 = cases.DTYPES["bf16"]
    x = np.array([[256, 1]], bf16)
    w = np.ones((4, 2), bf16)
    residual = np.full((1, 4), -256, bf16)
    got = pk.skinny_matmul(x, w, residual=residual, **FORMS[form])
    assert (np.asarray(got, np.float32) == 0).all()
    wide = pk.skinny_matmul(x, w, out_dtype=jnp.float32, **FORMS[form])
    assert (np.asarray(wide) == 257).all()


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_swiglu_rounds_gate_up_silu_and_product_as_the_oracle_does(impl):
    # Integer sums are exact in any order, so that every rounding must fall in the same place.
    rng = np.random.default_rng(0)
    bf16 = cases.DTYPES["bf16"]
    x = rng.integers(-4, 5, (7, 24)).astype(bf16)
    w = rng.integers(-4, 5, (64, 24)).astype(bf16)
    got = np.asarray(pk.skinny_matmul_swiglu(x, w, impl=impl))
    assert_same_bits(got, ops.skinny_matmul_swiglu(x, w))


@each_form
def test_sums_are_f32_for_bf16_operands(form):
    # Sums held in bf16 would stop growing at 256.
    ones = np.ones((2, 4096), cases.DTYPES["bf16"])
    got = pk.skinny_matmul(ones[:, :1024], ones[:, :1024], out_dtype=jnp.float32, **FORMS[form])
    assert (np.asarray(got) == 1024).all()


def test_what_lies_past_a_ragged_tile_is_not_read_as_a_number():
    """Interpret mode clamps indices, so a mask left out would show the last rows again."""
    x, w, residual = cases.make_matmul(cases.MatmulCase("ragged", 3, 40, 24, dtype="f32"))
    got = pk.skinny_matmul(x, w, impl="interpret", config=SPLIT)
    assert_close(got, ops.skinny_matmul(x, w))
    # Integers, so that every order of sums is exact: equal bits, whatever the tiles.
    whole = np.sign(w)
    for config in (SPLIT, pk.SkinnyMatmulConfig(16, 16, 3)):
        got = pk.skinny_matmul(np.sign(x), whole, impl="interpret", config=config)
        assert_same_bits(got, np.asarray(np.sign(x) @ whole.T))


@pytest.mark.parametrize("rows", [32, 130])
def test_every_row_count_is_served(rows):
    x, w, _ = cases.make_matmul(cases.MatmulCase("rows", rows, 64, 48, dtype="f32"))
    got = pk.skinny_matmul(x, w, impl="interpret")
    assert_close(got, ops.skinny_matmul(x, w))


def by_auto(rows, inner, out):
    """What "auto" traces for so many rows of a weight."""
    x = jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((out, inner), jnp.bfloat16)
    return str(jax.make_jaxpr(lambda x, w: pk.skinny_matmul(x, w))(x, w))


def test_auto_is_xlas_product_whatever_the_shape():
    for (inner, out), tuned in TUNED.items():
        assert tuned.source
        for rows in (1, 16, 32, 33, 128):
            assert "pallas_call" not in by_auto(rows, inner, out)
    x, w, _ = cases.make_matmul(cases.MATMUL[0])
    assert_close(pk.skinny_matmul(x, w), ops.skinny_matmul(x, w))


@pytest.mark.parametrize(
    "inner, out", [(576, 1536), (4096, 6144), (1536, 576), (8, 6), (64, 49152)]
)
@pytest.mark.parametrize("rows, itemsize", [(1, 2), (16, 4), (128, 4)])
def test_tiles_fit_a_gpu_and_leave_no_part_without_work(inner, out, rows, itemsize):
    tiles = tiles_for(inner, out, itemsize)
    block_r = rows_in_block(rows, inner, tiles, has_norm=False)
    assert block_r == (8 if tiles.num_sums > 1 else min(rows, 64))
    assert inner > tiles.block_k * (tiles.split_k - 1)
    stages = stages_that_fit(tiles, block_r + tiles.block_n, itemsize)
    a_stage = (block_r + tiles.block_n) * tiles.block_k * tiles.num_sums * itemsize
    assert 1 <= stages <= tiles.num_stages
    assert stages * a_stage <= 96 << 10
    assert stages == tiles.num_stages or (stages + 1) * a_stage > 96 << 10  # all that fit


@pytest.mark.parametrize("inner, out", [(576, 960), (576, 3072), (576, 576), (1536, 576)])
def test_all_steps_of_a_short_product_with_few_tiles_are_under_way_at_once(inner, out):
    tiles = tiles_for(inner, out, 2)
    block_r = rows_in_block(16, inner, tiles, has_norm=False)
    stages = stages_that_fit(tiles, block_r + tiles.block_n, 2)
    assert inner <= (stages - 1) * tiles.block_k * tiles.num_sums


def test_a_norm_before_a_short_product_gives_a_row_the_same_bits_among_any_number_of_rows():
    x, w, residual = cases.make_matmul(cases.MatmulCase("rows", 17, 96, 32, dtype="f32"))
    run = partial(pk.skinny_matmul, impl="interpret", norm=_norm_weight(x), eps=EPS)
    want = run(x, w, residual=residual)
    assert_same_bits(run(x[:3], w, residual=residual[:3]), np.asarray(want)[:3])


def test_the_norm_of_a_long_row_is_read_in_steps():
    x, w, _ = cases.make_matmul(cases.MatmulCase("long", 2, 2100, 16, dtype="f32"))
    got = pk.skinny_matmul(x, w, impl="interpret", norm=_norm_weight(x), eps=EPS)
    assert_close(got, ops.skinny_matmul(normed(x), w))


def test_sums_of_a_step_are_added_in_order():
    x, w, _ = cases.make_matmul(cases.MatmulCase("sums", 3, 200, 48, dtype="f32"))
    configs = [
        pk.SkinnyMatmulConfig(8, 16, split, num_sums=sums) for split in (1, 2) for sums in (1, 3)
    ]
    got = [np.asarray(pk.skinny_matmul(x, w, impl="interpret", config=c)) for c in configs]
    for one in got:
        assert_close(one, ops.skinny_matmul(x, w))
    assert (got[0] != got[1]).any()
    # Integers, so that every order of sums is exact: equal bits, whatever the tiles.
    for config in configs:
        exact = pk.skinny_matmul(np.sign(x), np.sign(w), impl="interpret", config=config)
        assert_same_bits(exact, np.asarray(np.sign(x) @ np.sign(w).T))


@pytest.mark.parametrize("missing", ["jax_triton", "triton"])
def test_triton_without_its_package_is_refused_in_one_sentence(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "pallas_kernels._skinny_triton", raising=False)
    with pytest.raises(NotImplementedError, match=r"skinny_matmul: impl='triton' needs jax-triton"):
        pk.skinny_matmul(GOOD["x"], GOOD["w"], impl="triton")


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
        ({"norm": jnp.zeros(6, jnp.bfloat16)}, "norm is bf16[6], wanted shape [48]"),
        ({"norm": jnp.zeros(48)}, "norm is f32[48], wanted dtype bfloat16"),
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
    ids=[
        "rank",
        "transposed",
        "dtype",
        "norm",
        "norm_dtype",
        "residual",
        "residual_dtype",
        "residual_and_out_dtype",
    ],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.skinny_matmul(**{**GOOD, **bad})
    assert str(error.value).startswith("skinny_matmul: ")


def test_an_odd_gate_up_weight_is_refused():
    with pytest.raises(ValueError, match="skinny_matmul_swiglu: w_gate_up has 7 rows"):
        pk.skinny_matmul_swiglu(GOOD["x"], jnp.zeros((7, 48), jnp.bfloat16))


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"block_n": 48}, "config.block_n is 48, wanted a power of two from 8"),
        ({"block_k": 8}, "config.block_k is 8, wanted a power of two from 16"),
        ({"split_k": 0}, "config.split_k is 0, wanted at least 1"),
        ({"num_sums": 0}, "config.num_sums is 0, wanted at least 1"),
    ],
    ids=["not_a_power", "too_small", "no_part", "no_sum"],
)
def test_tiles_that_triton_does_not_take_are_refused(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pk.skinny_matmul(**GOOD, config=pk.SkinnyMatmulConfig(**bad))
