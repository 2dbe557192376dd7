"""selector_walk, greedy and sampled: the path, its scores and q, ties to the lowest token id."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.selector_walk import SelectorWalkConfig, selector_walk_config
from tests import cases
from tests.cases import WalkCase
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")
each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])


@cache
def selector_walk(k=16, impl="auto"):
    return jax.jit(partial(pk.selector_walk, k=k, impl=impl))


@cache
def sampled_walk(k=16, impl="auto"):
    return jax.jit(partial(pk.selector_walk_sampled, k=k, impl=impl))


@each_impl
@pytest.mark.parametrize("case", cases.WALK, ids=lambda case: case.name)
def test_every_case_of_the_walk_equals_the_oracle(case, impl):
    inputs = cases.make_walk(case)
    path, scores = selector_walk(case.k, impl)(*inputs)
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


def walk(x, impl, k=16):
    return [np.asarray(y) for y in selector_walk(k, impl)(*x.values())]


@each_impl
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_unary_scores_order_candidates_whatever_their_sign(sign, impl):
    x = lattice()
    x["vals"][...] = sign * 10 + np.linspace(1, 0, 16, dtype=np.float32)
    path, scores = walk(x, impl)
    np.testing.assert_array_equal(path, [[0, 16, 32]])
    np.testing.assert_array_equal(scores, x["vals"])


@each_impl
def test_the_best_path_may_need_the_last_candidate_and_a_late_dimension(impl):
    """Only dim 200 of 256 tells, and each row's winner is the one of rank 15 (B16)."""
    x = lattice()
    x["vals"][...] = np.linspace(3, 0, 16, dtype=np.float32)
    x["predecessor"][[190, 15, 31], 200] = 2
    x["successor"][[15, 31, 47], 200] = 5
    np.testing.assert_array_equal(walk(x, impl)[0], [[15, 31, 47]])
    x["hproj"][0, 1, 200] = 0  # row 1 alone loses its edge, and with it row 2 its predecessor
    np.testing.assert_array_equal(walk(x, impl)[0], [[15, 16, 32]])


@each_impl
def test_the_edge_comes_from_the_chosen_token_not_from_the_same_column(impl):
    x = lattice()
    x["vals"][0, 0, 3] = 1  # token 3 is chosen first
    x["predecessor"][3, 0] = 1
    x["successor"][16 + 9, 0] = 4
    path, scores = walk(x, impl)
    np.testing.assert_array_equal(path, [[3, 25, 32]])
    assert scores[0, 1, 9] == 4


@each_impl
def test_the_first_row_follows_the_anchor_of_its_own_sequence(impl):
    x = lattice(batch=2)
    x["anchor"] = np.array([190, 191], np.int32)
    x["predecessor"][191, 7] = 1
    x["successor"][5, 7] = 1
    np.testing.assert_array_equal(walk(x, impl)[0], [[0, 16, 32], [5, 16, 32]])


@each_impl
def test_equal_scores_go_to_the_lowest_token_id_not_the_lowest_rank(impl):
    x = lattice()
    x["ids"] = x["ids"][:, :, ::-1].copy()  # the lowest id has rank 15
    np.testing.assert_array_equal(walk(x, impl)[0], [[0, 16, 32]])
    x["vals"][0, 1] = -4  # an edge lifts rank 2 (token 29) to the level of token 31's unary
    x["vals"][0, 1, 0] = 2
    x["predecessor"][0, 0], x["successor"][29, 0] = 1, 6
    np.testing.assert_array_equal(walk(x, impl)[0], [[0, 29, 32]])


@each_impl
def test_masked_candidates_are_never_chosen(impl):
    x = lattice()
    x["vals"][..., 7:] = 100
    x["successor"][...], x["predecessor"][...] = 1, 1
    path, scores = walk(x, impl, k=7)
    np.testing.assert_array_equal(path, [[0, 16, 32]])
    np.testing.assert_array_equal(scores[..., 7:], np.float32(pk.MASK_VALUE))


@each_impl
def test_a_walk_over_nan_stays_among_its_candidates(impl):
    x = lattice()
    x["hproj"][0, 1] = np.nan
    path, _ = walk(x, impl, k=7)
    assert path[0, 0] == 0
    assert 16 <= path[0, 1] < 23
    assert path[0, 2] == 32


@each_impl
def test_a_walk_keeps_its_bits_in_another_batch_row(impl):
    case = cases.WALK[1]
    anchor, vals, ids, hproj, *codebooks = cases.make_walk(case)
    path, scores = (
        np.asarray(y) for y in selector_walk(case.k, impl)(anchor, vals, ids, hproj, *codebooks)
    )
    order = np.array([2, 0, 1])
    got = selector_walk(case.k, impl)(
        anchor[order], vals[order], ids[order], hproj[order], *codebooks
    )
    np.testing.assert_array_equal(got[0], path[order])
    assert_same_bits(got[1], scores[order])
    # Row j, given its predecessor as the anchor, walks on as row 0.
    rest = lambda x: np.roll(x, -1, axis=1)
    got = selector_walk(case.k, impl)(path[:, 0], rest(vals), rest(ids), rest(hproj), *codebooks)
    np.testing.assert_array_equal(np.asarray(got[0])[:, :-1], path[:, 1:])
    assert_same_bits(np.asarray(got[1])[:, :-1], scores[:, 1:])


@pytest.mark.parametrize(
    "case, impl",
    [(cases.WALK[1], "xla"), (cases.WALK[1], "interpret"), (cases.WALK[2], "xla")],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_case_of_the_sampled_walk_equals_the_oracle(case, impl):
    inputs = cases.make_walk_draws(case)
    path, scores, q = sampled_walk(case.k, impl)(*inputs)
    want = ops.selector_walk_sampled(*inputs, k=case.k)
    np.testing.assert_array_equal(path, want[0])
    assert_close(scores[..., : case.k], want[1][..., : case.k])
    assert_close(q, want[2])
    greedy = selector_walk(case.k, impl)(*inputs[:6])
    np.testing.assert_array_equal(path[0], greedy[0][0])  # temperature 0
    assert_same_bits(scores[0], greedy[1][0])


@each_impl
def test_draws_are_distributed_as_the_q_that_is_returned(impl):
    """400 sequences with evenly spread uniforms draw each candidate within one of 400 q."""
    case, count = WalkCase("spread", 1, 1, 300, 32), 400
    inputs = cases.make_walk(case)
    many = [np.repeat(x, count, axis=0) for x in inputs[:4]] + list(inputs[4:])
    uniforms = ((np.arange(count, dtype=np.float32) + 0.5) / count)[:, None]
    path, _, q = sampled_walk(9, impl)(*many, np.full(count, 0.8, np.float32), uniforms)
    assert_same_bits(q, np.repeat(np.asarray(q)[:1], count, axis=0))
    drawn = (np.asarray(path) == inputs[2][0, 0]).sum(axis=0)  # [16]
    assert np.abs(drawn - np.asarray(q)[0, 0] * count).max() < 1.01
    assert (np.asarray(q)[..., 9:] == 0).all()
    np.testing.assert_allclose(np.asarray(q).sum(axis=-1), 1, rtol=1e-6)


@each_impl
def test_no_draw_takes_what_q_says_is_impossible(impl):
    x = lattice(batch=3)
    x["vals"][...] = np.where(np.arange(16) % 5 == 2, np.float32(1), np.float32(-400))
    uniforms = np.array([0, np.nextafter(np.float32(1), 0), 0.4], np.float32)[:, None].repeat(3, 1)
    path, _, q = sampled_walk(16, impl)(*x.values(), np.full(3, 0.5, np.float32), uniforms)
    picked = np.take_along_axis(np.asarray(q), np.asarray(path)[..., None] % 16, axis=2)
    np.testing.assert_allclose(picked, 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(path) % 16, [[2] * 3, [12] * 3, [7] * 3])


@each_impl
def test_a_sampled_walk_over_nan_and_infinities_has_a_q(impl):
    x = lattice(batch=3)
    x["hproj"][0, 1] = np.nan
    x["vals"][1:, :, 3], x["vals"][1:, :, 4] = np.inf, -np.inf
    temperature, uniforms = np.array([0.7, 1e-30, 0], np.float32), np.full((3, 3), 0.5, np.float32)
    path, _, q = sampled_walk(16, impl)(*x.values(), temperature, uniforms)
    np.testing.assert_allclose(np.asarray(q).sum(axis=-1), 1, rtol=1e-6)
    assert (np.asarray(path) // 16 == [[0, 1, 2]] * 3).all()
    np.testing.assert_array_equal(path[1:], [[3, 19, 35]] * 2)


def test_no_number_of_rows_ahead_changes_a_bit():
    case = cases.WALK[1]
    inputs = cases.make_walk(case)
    path, scores = selector_walk(case.k, "interpret")(*inputs)
    options = {"k": case.k, "impl": "interpret", "config": SelectorWalkConfig(depth=4)}
    got = jax.jit(partial(pk.selector_walk, **options))(*inputs)
    np.testing.assert_array_equal(got[0], path)
    assert_same_bits(got[1], scores)


@pytest.mark.parametrize("rank, itemsize, depth", [(255, 2, 2), (256, 2, 1), (128, 4, 1)])
def test_long_codebook_rows_are_read_one_row_ahead(rank, itemsize, depth):
    dtype = {2: jnp.bfloat16, 4: jnp.float32}[itemsize]
    assert selector_walk_config(rank, dtype) == SelectorWalkConfig(depth, num_warps=4)


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
        (
            dict.fromkeys(("predecessor", "successor"), jax.ShapeDtypeStruct((2**26 + 1, 8), "f4")),
            "predecessor has 67108865 rows, wanted at most 67108864",
        ),
    ],
    ids=["candidates", "vals_dtype", "ids_dtype", "anchor", "hproj", "codebooks", "k", "vocab"],
)
def test_a_wrong_argument_of_the_walk_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.selector_walk(**{**GOOD, **bad})
    assert str(error.value).startswith("selector_walk: ")


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"temperature": jnp.zeros(3)}, "temperature is f32[3], wanted shape [2]"),
        ({"uniforms": jnp.zeros((2, 4))}, "uniforms is f32[2, 4], wanted shape [2, 3]"),
        ({"uniforms": jnp.zeros((2, 3), jnp.bfloat16)}, "wanted dtype float32"),
    ],
    ids=["temperature", "uniforms", "dtype"],
)
def test_a_wrong_argument_of_the_sampled_walk_is_one_sentence(bad, message):
    noise = {"temperature": jnp.zeros(2), "uniforms": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.selector_walk_sampled(**{**GOOD, **noise, **bad})
    assert str(error.value).startswith("selector_walk_sampled: ")


def test_a_rank_that_the_kernel_does_not_serve_is_refused_and_auto_takes_the_xla_form():
    wide = {**GOOD, **{name: jnp.zeros((40, 600)) for name in ("predecessor", "successor")}}
    wide["hproj"] = jnp.zeros((2, 3, 600))
    with pytest.raises(NotImplementedError, match="no kernel for rank 600, only for up to 512"):
        pk.selector_walk(**wide, impl="interpret")
    assert jax.eval_shape(pk.selector_walk, **wide)[0].shape == (2, 3)
