"""markov_argmax: the token that base logits and a bias choose together, in either form."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.markov_argmax import MarkovArgmaxConfig
from tests import cases
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference.markov_argmax import markov_argmax

pytestmark = pytest.mark.usefixtures("strict_dtypes")
each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])


def call(impl, row=0, **static):
    return jax.jit(partial(pk.markov_argmax, row=row, impl=impl, **static))


@pytest.mark.parametrize(
    "case, impl",
    [(case, "xla") for case in cases.MARKOV]
    # The interpreter takes a second a shape, and the others hold all that this one has.
    + [(case, "interpret") for case in cases.MARKOV if case.name != "one_tile"],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_case_chooses_the_oracles_token(case, impl):
    inputs = cases.make_markov(case)
    static = {"row": case.rows - 1, "vocab": case.vocab, "with_bias": case.with_bias}
    got = call(impl, **static)(*inputs)
    ids, bias = markov_argmax(*inputs, **static)
    assert got.ids.dtype == np.int32
    np.testing.assert_array_equal(got.ids, ids)
    assert (got.bias is None) == (not case.with_bias)
    if bias is not None:
        assert got.bias is not None and got.bias.dtype == np.float32
        assert_close(got.bias, bias)


@each_impl
def test_ties_and_faults_in_every_tile_are_decided_as_by_greedy_rows(impl):
    """300 columns are three tiles of 128, the last one ragged; 290 of them are tokens."""
    base = np.random.default_rng(0).standard_normal((7, 2, 300)).astype(np.float32)
    code, out = np.zeros((7, 16), np.float32), np.ones((300, 16), np.float32)
    base[0, 1, [289, 140, 30]] = 9  # equal in all tiles
    base[1, 1, 290:] = np.inf  # padding may be anything
    base[2, 1, 128] = np.nan
    base[3, 1] = np.nan
    base[4, 1] = -np.inf
    base[5, 1, 289] = np.inf
    code[6] = np.nan  # and with it all of the bias
    got = call(impl, 1, vocab=290)(base, code, out).ids
    want = pk.argmax_rows(base[:, 1] + code @ out.T, vocab=290, impl="xla")
    np.testing.assert_array_equal(got, want)
    assert np.asarray(got)[[0, 3, 4, 5, 6]].tolist() == [30, 0, 0, 289, 0]


def test_a_traced_row_and_other_tiles_change_no_bit():
    case = cases.MARKOV[1]
    inputs = cases.make_markov(case)
    small = MarkovArgmaxConfig(block_v=32, block_k=16, num_warps=1)
    static = {"vocab": case.vocab, "with_bias": True}
    traced = jax.jit(partial(pk.markov_argmax, **static, impl="interpret", config=small))
    got, want = traced(*inputs, jnp.int32(1)), call("xla", 1, **static)(*inputs)
    np.testing.assert_array_equal(got.ids, want.ids)
    assert_same_bits(got.bias, want.bias)  # sums of small integers are exact in any order


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"base": jnp.zeros((2, 40))}, "base is f32[2, 40], wanted [B, J, V]"),
        ({"base": jnp.zeros((2, 3, 40), jnp.bfloat16)}, "wanted dtype float32"),
        ({"code": jnp.zeros((3, 8))}, "code is f32[3, 8], wanted shape [2, 8]"),
        ({"out": jnp.zeros((41, 8))}, "out is f32[41, 8], wanted shape [40, 8]"),
        ({"out": jnp.zeros((40, 8), jnp.bfloat16)}, "wanted dtype float32"),
        ({"vocab": 41}, "vocab is 41, wanted 1 to the 40 columns"),
        ({"row": 3}, "row is 3, wanted 0 to 2"),
        ({"config": MarkovArgmaxConfig(block_v=48)}, "config.block_v is 48, wanted a power"),
    ],
    ids=["rank", "base_dtype", "code", "out", "out_dtype", "vocab", "row", "tiles"],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    base = {"base": jnp.zeros((2, 3, 40)), "code": jnp.zeros((2, 8)), "out": jnp.zeros((40, 8))}
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.markov_argmax(**{**base, **bad})
    assert str(error.value).startswith("markov_argmax: ")


def test_more_columns_than_the_kernel_serves_are_refused_before_anything_compiles():
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    base, code, out = shape((1, 1, 1_200_000)), shape((1, 8)), shape((1_200_000, 8))
    with pytest.raises(NotImplementedError, match="1200000 columns, only for up to 1048576"):
        jax.eval_shape(partial(pk.markov_argmax, impl="interpret"), base, code, out)
