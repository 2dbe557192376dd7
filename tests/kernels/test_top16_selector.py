"""top16, argmax_rows and selector_walk: exact ids, ties to the lowest token id, masked columns."""

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
from tests import cases
from tests.cases import WalkCase
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@cache
def top16(k=16, vocab=None):
    return jax.jit(partial(pk.top16, k=k, vocab=vocab))


@cache
def argmax_rows(vocab=None):
    return jax.jit(partial(pk.argmax_rows, vocab=vocab))


@cache
def selector_walk(k=16):
    return jax.jit(partial(pk.selector_walk, k=k))


def assert_top16_is_exact(logits, k=16, vocab=None):
    vals, ids = top16(k, vocab)(logits)
    want_vals, want_ids = ops.top16(logits, k=k, vocab=vocab)
    assert (vals.dtype, ids.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(vals, want_vals)
    np.testing.assert_array_equal(argmax_rows(vocab)(logits), want_ids[:, 0])


@pytest.mark.parametrize("case", cases.TOP, ids=lambda case: case.name)
def test_every_case_of_top16_equals_the_oracle_exactly(case):
    assert_top16_is_exact(cases.make_top(case), case.k, case.vocab)


# Few values, so that ties, rows of infinities and NaN among the best come up often.
LOGITS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3e38, 3e38, -np.inf, np.inf, np.nan])


@given(st.data())
def test_top16_is_exact_for_any_small_row(data):
    """2,200 columns are 18 groups of 128, the last one ragged: both stages work."""
    logits = np.full((2, 2200), -5, np.float32)
    for row in logits:
        spots = data.draw(st.lists(st.tuples(st.integers(0, 2199), LOGITS), max_size=40))
        for token, value in spots:
            row[token] = value
    assert_top16_is_exact(logits)


@given(st.lists(LOGITS, min_size=17, max_size=17))
def test_top16_is_exact_when_nearly_all_of_the_row_is_taken(row):
    assert_top16_is_exact(np.array([row], np.float32))


@pytest.mark.parametrize("columns", [40, 2200])
def test_rows_with_few_finite_logits_still_name_tokens_that_exist(columns):
    logits = np.full((3, columns), -np.inf, np.float32)
    logits[0, columns - 2] = -1
    logits[1] = np.nan
    assert_top16_is_exact(logits, vocab=columns - 1)
    vals, ids = (np.asarray(x) for x in top16(16, columns - 1)(logits))
    assert np.isfinite(vals).all()
    np.testing.assert_array_equal(ids[1], np.arange(16))


def test_huge_padding_columns_are_never_returned():
    # 307 tokens and 13 columns of padding (B30).
    logits = np.random.default_rng(0).standard_normal((4, 320)).astype(np.float32)
    logits[:, 307:] = np.inf
    assert np.asarray(top16(16, 307)(logits)[1]).max() < 307
    assert np.asarray(argmax_rows(307)(logits)).max() < 307


def test_top16_searches_group_maxima_and_survivors_but_not_the_vocabulary():
    traced = jax.make_jaxpr(top16())(jax.ShapeDtypeStruct((4, 151936), jnp.float32))
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


def test_vmap_of_top16_equals_rows():
    logits = cases.make_top(cases.TOP[4])
    vals, ids = jax.jit(jax.vmap(lambda row: pk.top16(row[None], vocab=4099)))(logits)
    want_vals, want_ids = ops.top16(logits, vocab=4099)
    np.testing.assert_array_equal(np.asarray(ids)[:, 0], want_ids)
    np.testing.assert_array_equal(np.asarray(vals)[:, 0], want_vals)


@pytest.mark.parametrize("case", cases.WALK, ids=lambda case: case.name)
def test_every_case_of_the_walk_equals_the_oracle(case):
    inputs = cases.make_walk(case)
    path, scores = selector_walk(case.k)(*inputs)
    want_path, want_scores = ops.selector_walk(*inputs, k=case.k)
    np.testing.assert_array_equal(path, want_path)
    assert_close(scores[..., : case.k], want_scores[..., : case.k])
    np.testing.assert_array_equal(scores[..., case.k :], np.float32(ops.MASKED))


def lattice(batch=1, rows=3, rank=256, vocab=200):
    """Inputs of a walk without edges: ids 16 * j, 16 * j + 1, ... in row j, all scores 0."""
    ids = np.arange(rows * 16, dtype=np.int32).reshape(1, rows, 16).repeat(batch, 0)
    return {
        "anchor": np.full(batch, 190, np.int32),
        "vals": np.zeros((batch, rows, 16), np.float32),
        "ids": ids,
        "hproj": np.ones((batch, rows, rank), np.float32),
        "predecessor": np.zeros((vocab, rank), np.float32),
        "successor": np.zeros((vocab, rank), np.float32),
    }


def walk(x, k=16):
    return [np.asarray(y) for y in selector_walk(k)(*x.values())]


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_unary_scores_order_candidates_whatever_their_sign(sign):
    x = lattice()
    x["vals"][...] = sign * 10 + np.linspace(1, 0, 16, dtype=np.float32)
    path, scores = walk(x)
    np.testing.assert_array_equal(path, [[0, 16, 32]])
    np.testing.assert_array_equal(scores, x["vals"])


def test_the_best_path_may_need_the_last_candidate_and_a_late_dimension():
    """Only dim 200 of 256 tells, and each row's winner is the one of rank 15 (B16)."""
    x = lattice()
    x["vals"][...] = np.linspace(3, 0, 16, dtype=np.float32)
    x["predecessor"][[190, 15, 31], 200] = 2
    x["successor"][[15, 31, 47], 200] = 5
    np.testing.assert_array_equal(walk(x)[0], [[15, 31, 47]])
    x["hproj"][0, 1, 200] = 0  # row 1 alone loses its edge, and with it row 2 its predecessor
    np.testing.assert_array_equal(walk(x)[0], [[15, 16, 32]])


def test_the_edge_comes_from_the_chosen_token_not_from_the_same_column():
    x = lattice()
    x["vals"][0, 0, 3] = 1  # token 3 is chosen first
    x["predecessor"][3, 0] = 1
    x["successor"][16 + 9, 0] = 4
    path, scores = walk(x)
    np.testing.assert_array_equal(path, [[3, 25, 32]])
    assert scores[0, 1, 9] == 4


def test_the_first_row_follows_the_anchor_of_its_own_sequence():
    x = lattice(batch=2)
    x["anchor"] = np.array([190, 191], np.int32)
    x["predecessor"][191, 7] = 1
    x["successor"][5, 7] = 1
    np.testing.assert_array_equal(walk(x)[0], [[0, 16, 32], [5, 16, 32]])


def test_equal_scores_go_to_the_lowest_token_id_not_the_lowest_rank():
    x = lattice()
    x["ids"] = x["ids"][:, :, ::-1].copy()  # the lowest id has rank 15
    np.testing.assert_array_equal(walk(x)[0], [[0, 16, 32]])
    x["vals"][0, 1] = -4  # an edge lifts rank 2 (token 29) to the level of token 31's unary
    x["vals"][0, 1, 0] = 2
    x["predecessor"][0, 0], x["successor"][29, 0] = 1, 6
    np.testing.assert_array_equal(walk(x)[0], [[0, 29, 32]])


def test_masked_candidates_are_never_chosen():
    x = lattice()
    x["vals"][..., 5:] = 100
    x["successor"][...], x["predecessor"][...] = 1, 1
    path, scores = walk(x, k=5)
    np.testing.assert_array_equal(path, [[0, 16, 32]])
    np.testing.assert_array_equal(scores[..., 5:], np.float32(pk.MASK_VALUE))


def test_a_walk_over_nan_stays_among_its_candidates():
    x = lattice()
    x["hproj"][0, 1] = np.nan
    path, _ = walk(x, k=7)
    assert path[0, 0] == 0
    assert 16 <= path[0, 1] < 23
    assert path[0, 2] == 32


def test_a_walk_keeps_its_bits_in_another_batch_row():
    case = WalkCase("batch", 3, 7, 300, 32)
    anchor, vals, ids, hproj, *codebooks = cases.make_walk(case)
    path, scores = (np.asarray(y) for y in selector_walk()(anchor, vals, ids, hproj, *codebooks))
    order = np.array([2, 0, 1])
    got = selector_walk()(anchor[order], vals[order], ids[order], hproj[order], *codebooks)
    np.testing.assert_array_equal(got[0], path[order])
    assert_same_bits(got[1], scores[order])
    # Row j, given its predecessor as the anchor, walks on as row 0.
    rest = lambda x: np.roll(x, -1, axis=1)
    got = selector_walk()(path[:, 0], rest(vals), rest(ids), rest(hproj), *codebooks)
    np.testing.assert_array_equal(np.asarray(got[0])[:, :-1], path[:, 1:])
    assert_same_bits(np.asarray(got[1])[:, :-1], scores[:, 1:])


GOOD = {
    "anchor": jnp.zeros(2, jnp.int32),
    "vals": jnp.zeros((2, 3, 16), jnp.float32),
    "ids": jnp.zeros((2, 3, 16), jnp.int32),
    "hproj": jnp.zeros((2, 3, 8), jnp.bfloat16),
    "predecessor": jnp.zeros((40, 8), jnp.bfloat16),
    "successor": jnp.zeros((40, 8), jnp.bfloat16),
}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"vals": jnp.zeros((2, 3, 8))}, "vals is f32[2, 3, 8], wanted shape [2, 3, 16]"),
        ({"vals": jnp.zeros((2, 3, 16), jnp.bfloat16)}, "wanted dtype float32"),
        ({"ids": jnp.zeros((2, 3, 16), jnp.uint32)}, "wanted dtype int32"),
        ({"anchor": jnp.zeros(3, jnp.int32)}, "anchor is i32[3], wanted shape [2]"),
        ({"hproj": jnp.zeros((3, 3, 8))}, "hproj is f32[3, 3, 8], wanted shape [2, 3, 8]"),
        ({"successor": jnp.zeros((41, 8))}, "successor is f32[41, 8], wanted shape [40, 8]"),
        ({"k": 17}, "k is 17, wanted 1 to 16"),
    ],
    ids=["candidates", "vals_dtype", "ids_dtype", "anchor", "hproj", "codebooks", "k"],
)
def test_a_wrong_argument_of_the_walk_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.selector_walk(**{**GOOD, **bad})
    assert str(error.value).startswith("selector_walk: ")


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"logits": jnp.zeros(40)}, "logits is f32[40], wanted [N, V]"),
        ({"logits": jnp.zeros((2, 40), jnp.int32)}, "logits is i32[2, 40], wanted one of"),
        ({"logits": jnp.zeros((2, 12))}, "k is 16, wanted 1 to 12"),
        ({"k": 0}, "k is 0, wanted 1 to 16"),
        ({"vocab": 41}, "vocab is 41, wanted 1 to the 40 columns"),
    ],
    ids=["rank", "dtype", "few_tokens", "k", "vocab"],
)
def test_a_wrong_argument_of_top16_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.top16(**{"logits": jnp.zeros((2, 40)), **bad})
    assert str(error.value).startswith("top16: ")
