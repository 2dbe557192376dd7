"""top16: exact values and ids, ties to the lowest token id, masked columns, in either form."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

import pallas_kernels as pk
from pallas_kernels.top16_selector import Top16Config
from tests import cases
from tests.kernels.compare import assert_close
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")
each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])


@cache
def top16(impl, k=16, vocab=None, **options):
    return jax.jit(partial(pk.top16, k=k, vocab=vocab, impl=impl, **options))


def assert_exact(logits, impl, k=16, vocab=None, **options):
    vals, ids = top16(impl, k, vocab, **options)(logits)
    want_vals, want_ids = ops.top16(logits, k=k, vocab=vocab)
    assert (vals.dtype, ids.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(vals, want_vals)


# The interpreter takes a second a shape; the others are compiled for an H200 and run by gpu_check.
INTERPRETED = (
    "sixteen_tokens",
    "seventeen_groups",
    "padded_vocabulary",
    "ties_everywhere",
    "bf16",
    "qwen3",
)


@pytest.mark.parametrize(
    "case, impl",
    [(case, "xla") for case in cases.TOP]
    + [(case, "interpret") for case in cases.TOP if case.name in INTERPRETED],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_case_equals_the_oracle_exactly(case, impl):
    assert_exact(cases.make_top(case), impl, case.k, case.vocab)


def test_a_tree_of_the_other_factor_finds_the_same():
    (case,) = (case for case in cases.TOP if case.name == "bf16")  # few rows, so 4 by default
    assert_exact(cases.make_top(case), "interpret", config=Top16Config(factor=8))


def test_a_tree_of_more_than_128_roots_finds_the_same():
    """600,000 columns are 147 chunks of 4,096; the best of them stand in a few and tie."""
    logits = np.random.default_rng(0).integers(-9, 0, (1, 600_000)).astype(np.float32)
    logits[0, [599_999, 599_990, 4096, 4095, 8]] = [3, 5, 3, 3, 4]
    assert_exact(logits, "interpret")


# Few values, so that ties, rows of infinities and NaN among the best come up often.
LOGITS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3e38, 3e38, -np.inf, np.inf, np.nan])


@each_impl
@given(st.data())
def test_top16_is_exact_for_any_small_row(impl, data):
    """2,200 columns are 18 groups of 128 and five of 512, the last of either ragged."""
    logits = np.full((3, 2200), -5, np.float32)
    for row in logits:
        spots = data.draw(st.lists(st.tuples(st.integers(0, 2199), LOGITS), max_size=40))
        for token, value in spots:
            row[token] = value
    assert_exact(logits, impl, vocab=2199)


@each_impl
@given(st.lists(LOGITS, min_size=17, max_size=17))
def test_top16_is_exact_when_nearly_all_of_the_row_is_taken(impl, row):
    assert_exact(np.array([row], np.float32), impl)


@pytest.mark.parametrize("columns, impl", [(40, "xla"), (2200, "xla"), (2200, "interpret")])
def test_rows_with_few_finite_logits_still_name_tokens_that_exist(columns, impl):
    logits = np.full((3, columns), -np.inf, np.float32)
    logits[0, columns - 2] = -1
    logits[1] = np.nan
    assert_exact(logits, impl, vocab=columns - 1)
    vals, ids = (np.asarray(x) for x in top16(impl, 16, columns - 1)(logits))
    assert np.isfinite(vals).all()
    np.testing.assert_array_equal(ids[1], np.arange(16))


def test_huge_padding_columns_are_never_returned():
    # 307 tokens and 13 columns of padding (B30).
    logits = np.random.default_rng(0).standard_normal((4, 320)).astype(np.float32)
    logits[:, 307:] = np.inf
    assert np.asarray(top16("xla", 16, 307)(logits)[1]).max() < 307
    assert np.asarray(pk.argmax_rows(logits, vocab=307)).max() < 307


@pytest.mark.parametrize("multiplier, impl", [(0.25, "xla"), (-3.0, "xla"), (-3.0, "interpret")])
def test_a_multiplier_and_a_soft_cap_order_what_they_give(multiplier, impl):
    """Levels lie far enough apart that no rounding of a tanh exchanges two of them."""
    logits = np.random.default_rng(0).integers(-20, 21, (3, 2200)).astype(np.float32)
    options = {"multiplier": multiplier, "soft_cap": 30.0}
    vals, ids = top16(impl, 16, 2100, **options)(logits)
    want_vals, want_ids = ops.top16(logits, vocab=2100, **options)
    np.testing.assert_array_equal(ids, want_ids)
    assert_close(vals, want_vals)


@each_impl
def test_logits_that_a_cap_makes_equal_go_to_the_lowest_id(impl):
    logits = np.full((1, 2200), -1000, np.float32)
    logits[0, 100:2200:100] = np.arange(500, 2600, 100)  # 21 of them, all of which tanh takes to 1
    vals, ids = top16(impl, 16, None, soft_cap=5.0)(logits)
    np.testing.assert_array_equal(ids[0], np.arange(100, 1700, 100))
    np.testing.assert_array_equal(vals, np.full((1, 16), 5, np.float32))


def test_top16_searches_group_maxima_and_survivors_but_not_the_vocabulary():
    traced = jax.make_jaxpr(top16("xla"))(jax.ShapeDtypeStruct((4, 151936), jnp.float32))
    widths = [
        eqn.invars[0].aval.shape[-1]
        for eqn in _equations(traced.jaxpr)
        if eqn.primitive.name in ("top_k", "sort")
    ]
    assert widths == [1187, 16, 2048]


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from _equations(sub)


@each_impl
def test_vmap_of_top16_equals_rows(impl):
    logits = cases.make_top(cases.TOP[4])
    vals, ids = jax.jit(jax.vmap(lambda row: pk.top16(row[None], vocab=4099, impl=impl)))(logits)
    want_vals, want_ids = ops.top16(logits, vocab=4099)
    np.testing.assert_array_equal(np.asarray(ids)[:, 0], want_ids)
    np.testing.assert_array_equal(np.asarray(vals)[:, 0], want_vals)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"logits": jnp.zeros(40)}, "logits is f32[40], wanted [N, V]"),
        ({"logits": jnp.zeros((2, 40), jnp.int32)}, "logits is i32[2, 40], wanted one of"),
        ({"logits": jnp.zeros((2, 12))}, "k is 16, wanted 1 to 12"),
        ({"k": 0}, "k is 0, wanted 1 to 16"),
        ({"vocab": 41}, "vocab is 41, wanted 1 to the 40 columns"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0, wanted a positive number or None"),
    ],
    ids=["rank", "dtype", "few_tokens", "k", "vocab", "soft_cap"],
)
def test_a_wrong_argument_of_top16_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.top16(**{"logits": jnp.zeros((2, 40)), **bad})
    assert str(error.value).startswith("top16: ")


def test_more_columns_than_the_tree_serves_are_refused_before_anything_compiles():
    logits = jax.ShapeDtypeStruct((16, 5_000_000), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="5000000 columns, only for up to 4194304"):
        jax.eval_shape(partial(pk.top16, impl="interpret"), logits)
