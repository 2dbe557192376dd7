"""The delta rule over prompts: kernel and XLA form against the oracle, and what a row sees."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests import cases
from tests.kernels.compare import TOLERANCE, assert_same_bits
from tests.reference.delta_rule_tiles import delta_rule_tiles as oracle

pytestmark = pytest.mark.usefixtures("strict_dtypes")

NAMES = "qkv g beta num_rows state".split()
each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])

OP = jax.jit(pk.delta_rule_tiles, static_argnames=("num_key_heads", "impl", "config"))


def run(arrays, impl, key_heads, config=None):
    found = OP(*arrays, num_key_heads=key_heads, impl=impl, config=config)
    return [np.array(x) for x in found]


def assert_close(got, want):
    """f32 arithmetic on whatever dtype came in."""
    assert got.dtype == np.float32
    error, scale = np.abs(got - want).max(), np.abs(want).max()
    assert error <= TOLERANCE["float32"] * scale, f"error {error:.3g} on a scale of {scale:.3g}"


@each_impl
@pytest.mark.parametrize("case", cases.TILES, ids=lambda case: case.name)
def test_rows_and_state_match_the_oracle(case, impl):
    arrays = cases.make_tiles(case)
    out, state = run(arrays, impl, case.heads[0])
    want_out, want_state = oracle(*arrays, num_key_heads=case.heads[0])
    assert_close(out, want_out)
    assert_close(state, want_state)
    for b, count in enumerate(case.count):
        assert not out[b, count:].any()
        if not count:
            assert_same_bits(state[b], arrays[4][b])


CASE = cases.TilesCase("bits", 48, (1, 2), (16, 32), (48, 48), dtype="f32")


@pytest.fixture
def arrays():
    return dict(zip(NAMES, cases.make_tiles(CASE), strict=True))


def part_of(arrays, begin, end, state):
    """The rows from begin to end, moved to the front of what a call takes."""
    moved = [np.roll(arrays[name], -begin, axis=1) for name in ("qkv", "g", "beta")]
    out, state = run((*moved, np.full(2, end - begin, np.int32), state), "interpret", 1)
    return out[:, : end - begin], state


def test_a_prompt_in_calls_of_whole_tiles_has_the_bits_of_one_call(arrays):
    whole, last = run(arrays.values(), "interpret", 1)
    first, state = part_of(arrays, 0, 16, arrays["state"])
    second, state = part_of(arrays, 16, 48, state)
    assert_same_bits(np.concatenate([first, second], axis=1), whole)
    assert_same_bits(state, last)


def test_a_row_does_not_notice_those_behind_it(arrays):
    whole, _ = run(arrays.values(), "interpret", 1)
    some, _ = part_of(arrays, 0, 21, arrays["state"])
    assert_same_bits(some, whole[:, :21])


# Where one number of row 21 is, and the heads and columns of outputs and states that it reaches.
BAD = {
    "key": ("qkv", 16, (slice(None), slice(None))),
    "value": ("qkv", 32, (0, 0)),
    "decay": ("g", 1, (1, slice(None))),
    "strength": ("beta", 1, (1, slice(None))),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_leaves_those_in_front_of_it_alone(arrays, name, bad):
    """A product of NaN or infinity with a weight of zero is NaN, where one lets it come about."""
    whole, last = run(arrays.values(), "interpret", 1)
    field, channel, (head, column) = BAD[name]
    arrays[field][0, 21, channel] = bad
    out, state = run(arrays.values(), "interpret", 1)
    whole[0, 21:, head, column] = last[0, head, ..., column] = np.nan
    np.testing.assert_array_equal(out, whole)
    np.testing.assert_array_equal(state, last)


def test_a_query_that_is_not_finite_spoils_its_own_output_alone(arrays):
    whole, last = run(arrays.values(), "interpret", 1)
    arrays["qkv"][0, 21, 0] = np.inf
    out, state = run(arrays.values(), "interpret", 1)
    whole[0, 21] = np.nan
    np.testing.assert_array_equal(out, whole)
    assert_same_bits(state, last)


def test_keys_are_brought_to_length_one_by_their_sum_over_two_hundred_tokens():
    """Known fault B36: the mean in the place of the sum, or the query's scale left out."""
    case = cases.TilesCase("long", 200, (1, 2), (16, 16), (200,), dtype="f32")
    qkv, g, beta, count, state = cases.make_tiles(case)
    given = qkv, 0.1 * g, beta, count, 0 * state
    out, state = run(given, "xla", 1)
    want, after = oracle(*given, num_key_heads=1)
    assert np.abs(after).max() < 50
    assert_close(out, want)
    assert_close(state, after)


@each_impl
def test_a_prompt_that_repeats_one_token_keeps_its_digits(arrays, impl):
    """Equal keys without decay: powers of the triangle grow past f32, substitution does not."""
    arrays["qkv"][:, :, :32] = arrays["qkv"][:, :1, :32]
    arrays["g"][:], arrays["beta"][:] = 0, 0.95
    out, state = run(arrays.values(), impl, 1)
    want, after = oracle(*arrays.values(), num_key_heads=1)
    assert_close(out, want)
    assert_close(state, after)


def test_tiles_of_another_width_have_the_same_bits(arrays):
    configs = (pk.DeltaRuleTilesConfig(block_v=width) for width in (16, 32))
    narrow, wide = (run(arrays.values(), "interpret", 1, config) for config in configs)
    for a, b in zip(narrow, wide, strict=True):
        assert_same_bits(a, b)


def test_dims_without_a_kernel_run_by_auto_and_are_refused_by_name():
    case = cases.TilesCase("small", 5, (1, 2), (8, 24), (5,), dtype="f32")
    arrays = cases.make_tiles(case)
    out, _ = run(arrays, "auto", 1)
    assert_close(out, oracle(*arrays, num_key_heads=1)[0])
    with pytest.raises(NotImplementedError, match=re.escape("dims of (16, 32, 64, 128, 256), not")):
        run(arrays, "interpret", 1)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"qkv": jnp.zeros((2, 48, 60))}, "qkv is f32[2, 48, 60], wanted 96 channels"),
        ({"state": jnp.zeros((1, 2, 16, 32))}, "state is f32[1, 2, 16, 32], wanted shape [2, 2"),
        ({"g": jnp.zeros((2, 47, 2))}, "g is f32[2, 47, 2], wanted shape [2, 48, 2]"),
        ({"num_rows": jnp.zeros(2, jnp.uint32)}, "num_rows is u32[2], wanted dtype int32"),
    ],
    ids=["channels", "states", "gates", "counts"],
)
def test_a_wrong_argument_is_one_sentence(arrays, bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.delta_rule_tiles(**{**arrays, **bad}, num_key_heads=1)
    assert str(error.value).startswith("delta_rule_tiles: ")
