"""greedy_rows and argmax_rows: best ids, finiteness and hashes, exactly, in either form."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.greedy_rows import GreedyRowsConfig
from tests import cases
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")
each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])


@cache
def greedy_rows(impl, vocab=None, with_hashes=False):
    return jax.jit(partial(pk.greedy_rows, vocab=vocab, with_hashes=with_hashes, impl=impl))


def assert_exact(logits, impl, vocab=None, with_hashes=True):
    got = greedy_rows(impl, vocab, with_hashes)(logits)
    want = ops.greedy_rows(logits, vocab=vocab, with_hashes=with_hashes)
    assert (got.ids.dtype, got.is_finite.dtype) == (np.int32, np.bool_)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


# The interpreter takes a second a shape; between them: one chunk, several, ragged, padded, bf16.
INTERPRETED = ("sixteen_tokens", "padded_vocabulary", "bf16", "qwen3")


@pytest.mark.parametrize(
    "case, impl",
    [(case, "xla") for case in cases.TOP]
    + [(case, "interpret") for case in cases.TOP if case.name in INTERPRETED],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_case_equals_the_oracle_exactly(case, impl):
    assert_exact(cases.make_top(case), impl, case.vocab, with_hashes=case.dtype == "f32")


@each_impl
def test_ties_infinities_and_nan_in_every_chunk_are_told(impl):
    """9,000 columns are three chunks of 4,096, the last one ragged; 8,500 of them are tokens."""
    logits = np.random.default_rng(0).standard_normal((9, 9000)).astype(np.float32)
    logits[0, [8200, 5000, 30]] = 9  # equal in all chunks
    logits[1, 8499] = 9
    logits[2, 8500:] = np.nan  # padding may be anything
    logits[3, 4095] = np.nan
    logits[4, 4096] = np.inf
    logits[5, 8499] = -np.inf
    logits[6] = np.nan
    logits[7] = -np.inf
    logits[8], logits[8, [40, 7000]] = -0.0, 0.0  # zeros are equal, their bits are not
    assert_exact(logits, impl, vocab=8500)
    ids, is_finite, _ = greedy_rows(impl, 8500, True)(logits)
    assert np.asarray(ids)[[0, 1, 6, 7, 8]].tolist() == [30, 8499, 0, 0, 0]
    assert np.asarray(is_finite).tolist() == [True] * 3 + [False] * 5 + [True]


@each_impl
def test_a_hash_tells_one_bit_and_one_exchange(impl):
    logits = np.random.default_rng(0).standard_normal((3, 5000)).astype(np.float32)
    logits[1:] = logits[0]
    logits[1, 4999] = np.nextafter(logits[1, 4999], np.float32(9))
    logits[2, [3, 4500]] = logits[2, [4500, 3]]
    hashes = np.asarray(greedy_rows(impl, None, True)(logits).hashes)
    assert len(set(hashes.tolist())) == 3


def test_a_hash_is_the_one_that_certificates_of_before_have():
    logits = np.array([[1.0, -2.5, 0.0, 3.25]], np.float32)
    hashes = np.asarray(greedy_rows("xla", None, True)(logits).hashes)
    assert hashes.dtype == np.uint32
    assert hashes.tolist() == [1024458752]


def test_no_tile_changes_a_result():
    logits = cases.make_top(cases.TOP[4])
    small = GreedyRowsConfig(block_v=256, num_warps=1)
    got = pk.greedy_rows(logits, vocab=4099, with_hashes=True, impl="interpret", config=small)
    for one, other in zip(got, greedy_rows("xla", 4099, True)(logits), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"logits": jnp.zeros(40)}, "logits is f32[40], wanted [N, V]"),
        ({"logits": jnp.zeros((2, 40), jnp.int32)}, "logits is i32[2, 40], wanted one of"),
        ({"vocab": 41}, "vocab is 41, wanted 1 to the 40 columns"),
        (
            {"logits": jnp.zeros((2, 40), jnp.bfloat16), "with_hashes": True},
            "logits are bfloat16, hashes want float32",
        ),
    ],
    ids=["rank", "dtype", "vocab", "hash_dtype"],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.greedy_rows(**{"logits": jnp.zeros((2, 40)), **bad})
    assert str(error.value).startswith("greedy_rows: ")


def test_more_columns_than_the_kernel_serves_are_refused_before_anything_compiles():
    logits = jax.ShapeDtypeStruct((1, 9_000_000), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="9000000 columns, only for up to 8388608"):
        jax.eval_shape(partial(pk.greedy_rows, impl="interpret"), logits)
