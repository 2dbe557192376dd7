"""paged_attention's kernel, interpreted: the oracle, the bits of a row, segments and refusals."""

import dataclasses
import re
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._attention_tiles import AttentionConfig, attention_config, segments_of
from tests import cases
from tests.cases import AttentionCase
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@cache
def kernel(is_causal=True, window=None, config=None):
    static = {"is_causal": is_causal, "window": window, "config": config}
    return jax.jit(partial(pk.paged_attention, impl="interpret", **static))


@pytest.mark.parametrize("case", cases.ATTENTION, ids=lambda case: case.name)
def test_every_case_equals_the_oracle_with_nan_in_all_unused_slots(case):
    inputs = cases.make_attention(case)
    got = kernel(case.is_causal, case.window)(*inputs)
    want = ops.paged_attention(*inputs, is_causal=case.is_causal, window=case.window)
    assert got.dtype == inputs[0].dtype
    assert_close(got, want)


# Four segments of 64 keys, then two of 128: a context of 300 keys leaves the last one dead.
CONFIG = AttentionConfig(block_r=16, block_s=32, first_segment=64, longest_segment=128)
LONG = AttentionCase("long", 80, (3, 1), 16, 16, 32, (80, 300), dtype="f32")


@pytest.fixture(scope="module")
def long_context():
    """Inputs and what a chunk of 80 rows gives: more tiles than run in parallel."""
    inputs = cases.make_attention(LONG)
    return inputs, np.asarray(kernel(config=CONFIG)(*inputs))


@pytest.mark.parametrize("rows", [1, 17])
def test_a_row_has_the_same_bits_at_every_chunk_size(long_context, rows):
    (q, k_pool, v_pool, table, args), want = long_context
    for first in (0, 41, 80 - rows):
        part = args.copy()
        part[:, 1] += first
        part[:, 0] = part[:, 1] + rows  # later rows are not written yet
        got = kernel(config=CONFIG)(q[:, first : first + rows], k_pool, v_pool, table, part)
        assert_same_bits(got, want[:, first : first + rows])


def test_a_row_has_the_same_bits_in_any_batch(long_context):
    (q, k_pool, v_pool, table, args), want = long_context
    for order in ([1], [1, 0]):
        got = kernel(config=CONFIG)(q[order, :16], k_pool, v_pool, table[order], args[order])
        assert_same_bits(got, want[order, :16])


def test_dead_segments_and_masked_keys_are_exact_no_ops(long_context):
    (q, k_pool, v_pool, table, args), want = long_context
    k_pool, v_pool = (np.where(np.isnan(pool), np.float32(3), pool) for pool in (k_pool, v_pool))
    table = table.copy()
    table[table < 0] = sorted(set(range(len(k_pool))) - set(table.ravel()))[: (table < 0).sum()]
    for kv_len in (16 * 32, 10**6):  # everything exists, and more than that is claimed
        longer = args.copy()
        longer[:, 0] = kv_len
        got = kernel(config=CONFIG)(q[:, :16], k_pool, v_pool, table, longer)
        assert_same_bits(got, want[:, :16])


def test_other_segments_give_other_bits(long_context):
    """What the tests above would see if segments followed the length."""
    inputs, want = long_context
    other = dataclasses.replace(CONFIG, first_segment=128)
    got = np.asarray(kernel(config=other)(*inputs))
    assert_close(got, want)
    assert (got[1] != want[1]).any()


def test_windows_have_the_same_bits_in_parallel_and_in_turn():
    case = dataclasses.replace(LONG, window=70)
    q, k_pool, v_pool, table, args = cases.make_attention(case)
    attend = kernel(False, 70, CONFIG)
    want = np.asarray(attend(q, k_pool, v_pool, table, args))
    reference = partial(ops.paged_attention, is_causal=False, window=70)
    assert_close(want, reference(q, k_pool, v_pool, table, args))
    part = args + np.array([0, 64, 64], np.uint32)
    assert_same_bits(attend(q[:, 64:], k_pool, v_pool, table, part), want[:, 64:])


def test_a_row_that_sees_no_key_is_zero_and_a_missing_page_hides_its_own_keys():
    q, k_pool, v_pool, table, args = cases.make_attention(LONG)
    table[1, 3] = -1
    want = ops.paged_attention(q[:, :16], k_pool, v_pool, table, args, is_causal=True)
    attend = kernel(config=CONFIG)
    assert_close(attend(q[:, :16], k_pool, v_pool, table, args), want)
    args[0, 0] = 0
    table[1] = -1
    assert (np.asarray(attend(q[:, :16], k_pool, v_pool, table, args)) == 0).all()


def test_a_key_that_is_not_a_number_reaches_the_rows_that_see_it_and_no_other():
    q, k_pool, v_pool, table, args = cases.make_attention(LONG)
    position = int(args[1, 1]) + 5
    k_pool[table[1, position // 16], :, position % 16] = np.nan
    got = np.asarray(kernel(config=CONFIG)(q[:, :16], k_pool, v_pool, table, args))
    assert np.isfinite(got[0]).all() and np.isfinite(got[1, :5]).all()
    assert np.isnan(got[1, 5:]).all()


@pytest.mark.parametrize("size", [-1e30, -1e5, 1e5, 1e30])
def test_equal_scores_of_any_size_weigh_all_keys_alike(size):
    q, k_pool, v_pool, table, args = cases.make_attention(LONG)
    q, k_pool = np.full_like(q, size), np.where(np.isnan(k_pool), k_pool, np.float32(1))
    want = ops.paged_attention(0 * q[:, :16], k_pool, v_pool, table, args, is_causal=True)
    assert_close(kernel(config=CONFIG)(q[:, :16], k_pool, v_pool, table, args), want)


@pytest.mark.parametrize("capacity", [64, 1000, 4096, 32768, 131072])
@pytest.mark.parametrize("lanes", [1, 8, 24, 64, 256])
def test_segments_cover_the_capacity_in_blocks_and_none_is_long_for_where_it_lies(capacity, lanes):
    config = attention_config(4, 128, 2, capacity, lanes)
    segments = segments_of(capacity, config)
    starts, ends = map(np.asarray, jax.jit(segments.keys_of)(np.arange(segments.count)))
    assert starts[0] == 0 and starts[-1] < capacity <= ends[-1]
    assert (starts[1:] == ends[:-1]).all()
    sizes = ends - starts
    assert (starts % config.block_s == 0).all() and (sizes % config.block_s == 0).all()
    assert (sizes <= np.maximum(starts // 4, config.first_segment)).all()
    assert segments.count <= 64
    for keys in (starts, ends - 1):
        held_by = jax.jit(segments.holding)(keys)
        np.testing.assert_array_equal(held_by, np.arange(segments.count))


@pytest.mark.parametrize(
    "capacity, lanes, count, longest",
    [(1024, 8, 8, 128), (4096, 8, 16, 256), (1024, 64, 4, 256), (4096, 64, 4, 1024)]
    + [(1024, 256, 1, 1024), (4096, 256, 1, 4096)],
)
def test_segments_are_those_measured_where_they_are_uniform(capacity, lanes, count, longest):
    config = attention_config(4, 128, 2, capacity, lanes)
    assert segments_of(capacity, config).count == count
    assert config.longest_segment == longest
    assert (config.block_r, config.block_s, config.num_warps, config.num_stages) == (16, 64, 4, 3)


@pytest.mark.parametrize("capacity, longest", [(8192, 512), (32768, 1024)])
def test_a_short_context_in_a_long_table_has_segments_to_share_out(capacity, longest):
    config = attention_config(4, 128, 2, capacity, 8)
    starts, ends = segments_of(capacity, config).keys_of(np.arange(8))
    assert (np.asarray(ends - starts) == 128).all()
    assert config.longest_segment == longest


def test_blocks_of_keys_take_the_same_memory_at_every_width_and_dtype():
    sizes = {
        (dim, itemsize): attention_config(4, dim, itemsize, 1024, 8).block_s
        for dim in (16, 96, 128, 256)
        for itemsize in (2, 4)
    }
    assert sizes == {
        (16, 2): 64,
        (96, 2): 64,
        (128, 2): 64,
        (256, 2): 32,
        (16, 4): 32,
        (96, 4): 32,
        (128, 4): 32,
        (256, 4): 16,
    }


@pytest.mark.parametrize(
    "generation, stages", [("8.0", 3), ("8.6", 2), ("9.0", 3), ("12.0", 2), ("13.7", 2)]
)
def test_a_gpu_with_less_shared_memory_gets_fewer_stages_and_the_same_tiles(
    monkeypatch, generation, stages
):
    here = attention_config(4, 128, 2, 1024, 8)
    device = SimpleNamespace(platform="gpu", compute_capability=generation)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    there = attention_config(4, 128, 2, 1024, 8)
    assert there == dataclasses.replace(here, num_stages=stages)


def test_a_gpu_that_is_too_old_is_refused_with_what_runs_there(monkeypatch):
    device = SimpleNamespace(platform="gpu", compute_capability="7.5", device_kind="Tesla T4")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    message = "decode: kernels need compute capability 8.0 and Tesla T4 has 7.5, supported here"
    for impl in ("auto", "pallas"):
        with pytest.raises(NotImplementedError, match=message):
            pk.check_impl("decode", impl)
    pk.check_impl("decode", "xla")


def test_tiles_depend_on_no_number_of_rows_and_hold_odd_groups():
    rows = {group: attention_config(group, 64, 2, 1024, 8).block_r for group in (1, 3, 4, 5, 8, 64)}
    assert rows == {1: 16, 3: 16, 4: 16, 5: 8, 8: 8, 64: 1}


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"head_dim": 8}, "a kernel for head dims 16 to 256, not 8"),
        ({"head_dim": 512}, "a kernel for head dims 16 to 256, not 512"),
        ({"page_size": 2}, "a kernel for pages of a power of two from 4 keys, not 2"),
        ({"page_size": 12}, "a kernel for pages of a power of two from 4 keys, not 12"),
        ({"heads": 96}, "a kernel for up to 64 heads a kv head, not 96"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sizes_without_a_kernel_are_refused_and_go_to_xla_by_auto(sizes, message):
    sizes = {"head_dim": 16, "page_size": 4, "heads": 2} | sizes
    q = jnp.zeros((1, 2, sizes["heads"], sizes["head_dim"]))
    pool = jnp.zeros((3, 1, sizes["page_size"], sizes["head_dim"]))
    operands = (q, pool, pool, jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 3), jnp.uint32))
    message = f"paged_attention: impl='interpret' has {message}, supported are 'auto' and 'xla'"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        pk.paged_attention(*operands, is_causal=True, impl="interpret")
    by_auto = partial(pk.paged_attention, is_causal=True)
    assert "pallas_call" not in str(jax.make_jaxpr(by_auto)(*operands))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_s": 48}, "block_s is 48, wanted a power of two"),
        ({"num_warps": 0}, "num_warps is 0, wanted a power of two"),
        (
            {"first_segment": 16},
            "block_s 32, first_segment 16 and longest_segment 128, wanted",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_configuration_is_one_sentence(change, message):
    with pytest.raises(ValueError, match=f"AttentionConfig: {message}"):
        dataclasses.replace(CONFIG, **change)
