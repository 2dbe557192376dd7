"""paged_attention: the XLA form against the oracle, masks, and the bits that the law rests on."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from tests import cases
from tests.cases import AttentionCase
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@cache
def attention(is_causal=True, window=None):
    return jax.jit(partial(pk.paged_attention, is_causal=is_causal, window=window))


@pytest.mark.parametrize("case", cases.ATTENTION, ids=lambda case: case.name)
def test_every_case_equals_the_oracle_with_nan_in_all_unused_slots(case):
    inputs = cases.make_attention(case)
    got = attention(case.is_causal, case.window)(*inputs)
    want = ops.paged_attention(*inputs, is_causal=case.is_causal, window=case.window)
    assert got.dtype == inputs[0].dtype
    assert_close(got, want)


# One shape for decode and one for prefill; lengths and positions vary inside it.
DECODE = AttentionCase("decode", 6, (4, 2), 16, 4, 8, (20, 25, 31))
PREFILL = AttentionCase("prefill", 72, (4, 2), 16, 64, 40, (2200, 1100, 1500))
SHAPES = [
    pytest.param(dataclasses.replace(case, dtype=dtype), id=f"{case.name}-{dtype}")
    for case in (DECODE, PREFILL)
    for dtype in ("f32", "bf16")
]
both_paths = pytest.mark.parametrize("case", SHAPES)


@both_paths
def test_a_row_keeps_its_bits_in_another_row_of_the_batch(case):
    q, k_pool, v_pool, table, args = cases.make_attention(case)
    want = np.asarray(attention()(q, k_pool, v_pool, table, args))
    order = np.array([2, 0, 1])
    got = attention()(q[order], k_pool, v_pool, table[order], args[order])
    assert_same_bits(got, want[order])


@both_paths
def test_a_row_keeps_its_bits_at_another_place_in_the_block(case):
    q, k_pool, v_pool, table, args = cases.make_attention(case)
    want = np.asarray(attention()(q, k_pool, v_pool, table, args))
    for shift in (1, 3):
        moved = args - np.array([0, shift, shift], np.uint32)  # row r + shift stands where r stood
        got = np.asarray(attention()(np.roll(q, shift, axis=1), k_pool, v_pool, table, moved))
        assert_same_bits(got[:, shift:], want[:, :-shift])


@both_paths
def test_a_row_keeps_its_bits_when_the_batch_around_it_is_other_data(case):
    q, k_pool, v_pool, table, args = cases.make_attention(case)
    want = np.asarray(attention()(q, k_pool, v_pool, table, args))
    others = q.copy()
    others[1:], others[0, 1:] = 7, -3
    shorter = args.copy()
    shorter[1:] = [3, 0, 0]
    got = np.asarray(attention()(others, k_pool, v_pool, table, shorter))
    assert_same_bits(got[0, 0], want[0, 0])


@both_paths
def test_masked_keys_are_exact_no_ops(case):
    """Keys behind a causal row change nothing, whether they exist, and whatever they hold."""
    q, k_pool, v_pool, table, args = cases.make_attention(case)
    want = np.asarray(attention()(q, k_pool, v_pool, table, args))
    for row in (0, case.rows // 2):
        ended = args.copy()
        ended[:, 0] = args[:, 1] + row + 1  # the row's own key is the last
        got = np.asarray(attention()(q, k_pool, v_pool, table, ended))
        assert_same_bits(got[:, : row + 1], want[:, : row + 1])
    behind = np.isfinite(k_pool.astype(np.float32)) & ~_seen_by_row_0(case, table, args)
    rng = np.random.default_rng(1)
    pools = [
        np.where(behind, rng.standard_normal(pool.shape).astype(pool.dtype), pool)
        for pool in (k_pool, v_pool)
    ]
    got = np.asarray(attention()(q, *pools, table, args))
    assert_same_bits(got[:, 0], want[:, 0])
    assert (got[:, -1] != want[:, -1]).any()


def _seen_by_row_0(case, table, args):
    """bool[pages, 1, page_size, 1]: slots of keys that row 0 of their sequence sees."""
    seen = np.zeros((len(case.kv_lens) * case.pages + 2, 1, case.page_size, 1), bool)
    for b, (_, q_offset, _) in enumerate(args.astype(int)):
        for key in range(q_offset + 1):
            seen[table[b, key // case.page_size], 0, key % case.page_size] = True
    return seen


@both_paths
def test_a_row_keeps_its_bits_wherever_its_pages_lie(case):
    q, k_pool, v_pool, table, args = cases.make_attention(case)
    want = attention()(q, k_pool, v_pool, table, args)
    to = np.random.default_rng(2).permutation(len(k_pool))  # page p moves to page to[p]
    moved = np.where(table < 0, -1, to[table]).astype(np.int32)
    back = np.argsort(to)
    assert_same_bits(attention()(q, k_pool[back], v_pool[back], moved, args), want)


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda case: case.name)
def test_a_row_that_sees_no_key_is_zero(case):
    q, k_pool, v_pool, table, _ = cases.make_attention(case)
    # Nothing exists; no page is owned; everything is out of the window's reach.
    args = np.array([[0, 0, 0], [9, 4, 4], [12, 0, 0]], np.uint32)
    table[1] = -1
    args[2, 1:] = 300
    out = np.asarray(attention(True, 5)(q, k_pool, v_pool, table, args), np.float32)
    assert (out == 0).all()


def test_a_missing_page_in_the_middle_hides_only_its_own_keys():
    q, k_pool, v_pool, table, args = cases.make_attention(dataclasses.replace(DECODE, dtype="f32"))
    table[:, 2] = -1
    want = ops.paged_attention(q, k_pool, v_pool, table, args, is_causal=True)
    assert_close(attention()(q, k_pool, v_pool, table, args), want)


def test_a_drafter_block_sees_its_later_rows_and_a_causal_one_does_not():
    q, k_pool, v_pool, table, args = cases.make_attention(dataclasses.replace(DECODE, dtype="f32"))
    last = int(args[0, 0]) - 1
    changed = v_pool.copy()
    changed[table[0, last // 4], :, last % 4] += 1
    for is_causal in (True, False):
        before = np.asarray(attention(is_causal)(q, k_pool, v_pool, table, args))
        after = np.asarray(attention(is_causal)(q, k_pool, changed, table, args))
        assert (before[0, 0] == after[0, 0]).all() == is_causal
        assert (before[0, -1] != after[0, -1]).any()


def test_scale_replaces_the_default_and_no_other_factor_remains():
    q, k_pool, v_pool, table, args = cases.make_attention(dataclasses.replace(DECODE, dtype="f32"))
    got = pk.paged_attention(q, k_pool, v_pool, table, args, is_causal=True, scale=0.7)
    want = ops.paged_attention(q, k_pool, v_pool, table, args, is_causal=True, scale=0.7)
    assert_close(got, want)


@pytest.mark.parametrize("size", [-1e30, -1e5, 1e5, 1e30])
def test_equal_scores_of_any_size_weigh_all_keys_alike(size):
    q, k_pool, v_pool, table, args = cases.make_attention(dataclasses.replace(DECODE, dtype="f32"))
    q, k_pool = np.full_like(q, size), np.where(np.isnan(k_pool), k_pool, np.float32(1))
    want = ops.paged_attention(0 * q, k_pool, v_pool, table, args, is_causal=True)
    assert_close(attention()(q, k_pool, v_pool, table, args), want)


@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=lambda case: case.name)
def test_vmap_over_requests_equals_a_loop_over_them(case):
    q, k_pool, v_pool, table, args = cases.make_attention(case)

    def one(q, table, args):
        return attention()(q[None], k_pool, v_pool, table[None], args[None])[0]

    want = ops.paged_attention(q, k_pool, v_pool, table, args, is_causal=True)
    assert_close(jax.jit(jax.vmap(one))(q, table, args), want)


def test_prefill_holds_no_scores_over_the_whole_capacity():
    capacity = 64 * 512
    shapes = (
        jax.ShapeDtypeStruct((1, 256, 4, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((600, 2, 64, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((600, 2, 64, 16), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 512), jnp.int32),
        jax.ShapeDtypeStruct((1, 3), jnp.uint32),
    )
    traced = str(jax.make_jaxpr(attention())(*shapes))
    sizes = [np.prod([int(n) for n in s.split(",")]) for s in re.findall(r"\[([\d,]+)\]", traced)]
    pool = 600 * 2 * 64 * 16
    assert max(size for size in sizes if size != pool) < 4 * 256 * capacity / 16


GOOD = {
    "q": jnp.zeros((2, 4, 8, 16), jnp.bfloat16),
    "k_pool": jnp.zeros((9, 2, 4, 16), jnp.bfloat16),
    "v_pool": jnp.zeros((9, 2, 4, 16), jnp.bfloat16),
    "block_table": jnp.zeros((2, 4), jnp.int32),
    "args": jnp.zeros((2, 3), jnp.uint32),
}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"q": jnp.zeros((2, 8, 16), jnp.bfloat16)}, "q is bf16[2, 8, 16], wanted [B, R, H, D]"),
        ({"q": jnp.zeros((2, 4, 9, 16), jnp.bfloat16)}, "q has 9 heads, not a multiple of 2 kv"),
        ({"q": jnp.zeros((2, 4, 8, 32), jnp.bfloat16)}, "q has head dim 32"),
        ({"q": jnp.zeros((2, 4, 8, 16), jnp.int32)}, "q is i32[2, 4, 8, 16], wanted one of"),
        ({"q": jnp.zeros((2, 0, 8, 16), jnp.bfloat16)}, "0 query rows over 4 pages"),
        ({"v_pool": jnp.zeros((8, 2, 4, 16), jnp.bfloat16)}, "wanted shape [9, 2, 4, 16]"),
        ({"block_table": jnp.zeros((3, 4), jnp.int32)}, "block_table is i32[3, 4]"),
        ({"block_table": jnp.zeros((2, 4), jnp.uint32)}, "wanted dtype int32"),
        ({"args": jnp.zeros((2, 2), jnp.uint32)}, "args is u32[2, 2], wanted shape [2, 3]"),
        ({"args": jnp.zeros((2, 3), jnp.int32)}, "wanted dtype uint32"),
        ({"window": 0}, "window is 0, wanted at least 1 or None"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.paged_attention(**{**GOOD, **bad}, is_causal=True)
    assert str(error.value).startswith("paged_attention: ")
