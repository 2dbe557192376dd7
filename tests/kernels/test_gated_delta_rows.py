"""Gated-DeltaNet rows: kernel and XLA form against the oracle, and what no row may notice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests import cases
from tests.kernels.compare import TOLERANCE, assert_same_bits
from tests.reference.gated_delta_rows import gated_delta_rows as oracle

pytestmark = pytest.mark.usefixtures("strict_dtypes")

NAMES = "qkv g beta num_rows state slots past_kv past_g past_beta num_kept".split()
each_impl = pytest.mark.parametrize("impl", ["xla", "interpret"])


OP = jax.jit(pk.gated_delta_rows, static_argnames=("num_key_heads", "impl", "config"))


def run(case, impl, arrays, config=None):
    out = OP(*arrays, num_key_heads=case.heads[0], impl=impl, config=config)
    return [np.asarray(x) for x in out]


def assert_close(got, want):
    """f32 arithmetic on whatever dtype came in; NaN where the oracle has left NaN."""
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    error, scale = np.nanmax(np.abs(got - want)), np.nanmax(np.abs(want))
    assert error <= TOLERANCE["float32"] * scale, f"error {error:.3g} on a scale of {scale:.3g}"


@each_impl
@pytest.mark.parametrize("case", cases.DELTA, ids=lambda case: case.name)
def test_rows_and_state_match_the_oracle(case, impl):
    arrays = cases.make_delta(case)
    out, state = run(case, impl, arrays)
    want_out, want_state = oracle(*arrays, num_key_heads=case.heads[0])
    assert_close(out, want_out)
    assert_close(state, want_state)
    for b, new in enumerate(case.new):
        assert not out[b, new:].any()
    nobody = np.setdiff1d(np.arange(len(state)), arrays[5])
    still = [slot for slot, kept in zip(arrays[5], case.kept, strict=True) if not kept]
    for slot in [*nobody, *still]:
        assert_same_bits(state[slot], arrays[4][slot])


CASE = cases.DeltaCase("bits", 4, (1, 2), (16, 16), (4, 4), (0, 0), dtype="f32")


@each_impl
def test_a_row_has_the_same_bits_in_a_block_and_after_it_was_folded(impl):
    """What makes verifying and plain decoding agree: row i of a block, and row 0 after i kept."""
    qkv, g, beta, _, state, slots, past_kv, past_g, past_beta, _ = cases.make_delta(CASE)
    key_width = 16
    for b, slot in enumerate(slots):
        past_kv[slot], past_g[slot], past_beta[slot] = qkv[b, :, key_width:], g[b], beta[b]

    def call(rows, num_rows, num_kept):
        shifted = [np.roll(x, -num_kept, axis=1) for x in (qkv, g, beta)]
        counts = np.full(2, num_rows, np.int32), np.full(2, num_kept, np.int32)
        past = past_kv, past_g, past_beta, counts[1]
        return run(CASE, impl, (*shifted, counts[0], state, slots, *past))

    block, _ = call(4, 4, 0)
    for i in range(1, 4):
        alone, folded = call(1, 1, i)
        assert_same_bits(alone[:, 0], block[:, i])
        again = folded.copy()
        again[slots] = call(1, 1, i)[1][slots]
        assert_same_bits(again, folded)


@each_impl
def test_a_sequence_notices_neither_its_neighbours_nor_its_slot(impl):
    case = cases.DELTA[2]
    arrays = dict(zip(NAMES, cases.make_delta(case), strict=True))
    out, state = run(case, impl, arrays.values())
    order = np.array([2, 0, 3, 1])
    moved = {n: x[order] if len(x) == 4 else x.copy() for n, x in arrays.items()}
    moved["slots"] = np.roll(arrays["slots"], 1)[order]
    for name in ("state", "past_kv", "past_g", "past_beta"):
        moved[name][np.roll(arrays["slots"], 1)] = arrays[name][arrays["slots"]]
    moved_out, moved_state = run(case, impl, moved.values())
    assert_same_bits(moved_out, out[order])
    assert_same_bits(moved_state[moved["slots"]], state[arrays["slots"]][order])


@each_impl
@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_out_of_range_has_no_rows_and_writes_nothing(impl, slot):
    arrays = dict(zip(NAMES, cases.make_delta(CASE), strict=True))
    arrays["num_kept"] = np.full(2, 2, np.int32)
    for name in ("past_kv", "past_g", "past_beta"):
        arrays[name] = np.nan_to_num(arrays[name])
    inside = arrays["slots"][0]
    arrays["slots"] = np.array([inside, slot], np.int32)
    out, state = run(CASE, impl, arrays.values())
    assert not out[1].any()
    others = np.setdiff1d(np.arange(3), [inside])
    assert_same_bits(state[others], arrays["state"][others])


def test_tiles_of_another_width_have_the_same_bits():
    """From 32 columns: a CPU's code for narrower ones multiplies and adds in another order."""
    arrays = cases.make_delta(cases.DELTA[2])
    tiles = (pk.GatedDeltaRowsConfig(block_v=width) for width in (32, 64))
    narrow, wide = (run(cases.DELTA[2], "interpret", arrays, config) for config in tiles)
    for a, b in zip(narrow, wide, strict=True):
        assert_same_bits(a, b)


def test_dims_without_a_kernel_run_by_auto_and_are_refused_by_name():
    case = cases.DeltaCase("small", 2, (1, 2), (8, 24), (2,), (1,), dtype="f32")
    arrays = cases.make_delta(case)
    out, state = run(case, "auto", arrays)
    want = oracle(*arrays, num_key_heads=1)
    assert_close(out, want[0])
    assert_close(state, want[1])
    with pytest.raises(NotImplementedError, match=re.escape("dims of (16, 32, 64, 128, 256), not")):
        run(case, "interpret", arrays)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"qkv": jnp.zeros((2, 4, 60))}, "qkv is f32[2, 4, 60], wanted 64 channels"),
        ({"state": jnp.zeros((3, 2, 16, 16), jnp.bfloat16)}, "state is bf16[3, 2, 16, 16], wanted"),
        ({"past_kv": jnp.zeros((2, 4, 48))}, "past_kv is f32[2, 4, 48], wanted shape [3, 4, 48]"),
        ({"past_g": jnp.zeros((3, 5, 2))}, "past_g is f32[3, 5, 2], wanted shape [3, 4, 2]"),
        ({"slots": jnp.zeros(2, jnp.uint32)}, "slots is u32[2], wanted dtype int32"),
        ({"num_kept": jnp.zeros(3, jnp.int32)}, "num_kept is i32[3], wanted shape [2]"),
    ],
    ids=["channels", "state_dtype", "slot_count", "past_rows", "slots_dtype", "kept_shape"],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    good = dict(zip(NAMES, map(jnp.asarray, cases.make_delta(CASE)), strict=True))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.gated_delta_rows(**{**good, **bad}, num_key_heads=1)
    assert str(error.value).startswith("gated_delta_rows: ")
