"""reshape_and_cache: against the oracle, dropped rows, and writing in place."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_kernels as pk
from tests import cases
from tests.kernels.compare import assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")


both_forms = pytest.mark.parametrize("impl", ["xla", "interpret"])


def write(impl):
    return jax.jit(partial(pk.reshape_and_cache, impl=impl))


@both_forms
@pytest.mark.parametrize("case", cases.CACHE, ids=lambda case: case.name)
def test_every_case_equals_the_oracle_bit_for_bit(case, impl):
    inputs = cases.make_cache(case)
    for got, want in zip(write(impl)(*inputs), ops.reshape_and_cache(*inputs), strict=True):
        assert_same_bits(got, want)


@both_forms
@pytest.mark.parametrize("owned", [False, True], ids=["last_page_unowned", "last_page_owned"])
def test_dropped_rows_leave_the_last_page_alone(owned, impl):
    """Slot -1 wraps to the last slot of the last page wherever it is taken for an index (A03)."""
    sentinel = np.full((4, 2, 4, 16), 7, np.float32)
    rows = np.ones((3, 2, 16), np.float32)
    slots = np.array([-1, 12 if owned else 5, -1], np.int32)  # slot 12 opens the last page
    for pool in write(impl)(rows, rows, sentinel, sentinel, slots):
        last = np.asarray(pool)[3]
        assert (last[:, 1 if owned else 0 :] == 7).all()
        assert (np.asarray(pool) != 7).sum() == 2 * 16


@both_forms
def test_any_negative_slot_is_dropped(impl):
    pool = np.full((2, 1, 4, 8), 7, np.float32)
    rows = np.ones((4, 1, 8), np.float32)
    slots = np.array([-1, -2, -8, np.iinfo(np.int32).min], np.int32)
    for written in write(impl)(rows, rows, pool, pool, slots):
        assert (np.asarray(written) == 7).all()


def test_vmap_over_layers_equals_a_loop_over_them():
    case = cases.CACHE[1]
    *layers, slots = (np.stack(x) for x in zip(*map(cases.make_cache, [case] * 3), strict=True))
    got = jax.jit(jax.vmap(pk.reshape_and_cache))(*layers, slots)
    for i in range(3):
        want = ops.reshape_and_cache(*(x[i] for x in layers), slots[i])
        assert_same_bits(got[0][i], want[0])
        assert_same_bits(got[1][i], want[1])


def test_pools_are_written_in_place_in_a_loop():
    # f32, since the CPU backend of jax 0.10 scatters bf16 by way of an f32 copy of the pool.
    case = dataclasses.replace(cases.CACHE[-1], dtype="f32", pool_dtype="f32")
    k, v, k_pool, v_pool, slots = cases.make_cache(case)

    def loop(k_pool, v_pool, num_steps):
        def step(i, pools):
            return pk.reshape_and_cache(k, v, *pools, slots + i)

        return lax.fori_loop(0, num_steps, step, (k_pool, v_pool))

    compiled = (
        jax.jit(loop, donate_argnames=("k_pool", "v_pool")).lower(k_pool, v_pool, 3).compile()
    )
    shape = ",".join(map(str, k_pool.shape))
    assert not re.findall(rf"\[{shape}\]\S* (copy|transpose)\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * k_pool.nbytes
    assert memory.temp_size_in_bytes < k_pool.nbytes / 2


GOOD = {
    "k": jnp.zeros((5, 2, 16), jnp.bfloat16),
    "v": jnp.zeros((5, 2, 16), jnp.bfloat16),
    "k_pool": jnp.zeros((9, 2, 4, 16), jnp.bfloat16),
    "v_pool": jnp.zeros((9, 2, 4, 16), jnp.bfloat16),
    "slots": jnp.zeros(5, jnp.int32),
}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"k": jnp.zeros((5, 32), jnp.bfloat16)}, "k is bf16[5, 32], wanted [N, K, D]"),
        (
            {"v": jnp.zeros((5, 1, 16), jnp.bfloat16)},
            "v is bf16[5, 1, 16], wanted shape [5, 2, 16]",
        ),
        ({"k_pool": jnp.zeros((9, 4, 2, 16), jnp.bfloat16)}, "v_pool is bf16[9, 2, 4, 16], wanted"),
        (
            {k: jnp.zeros((9, 4, 2, 16), jnp.bfloat16) for k in ("k_pool", "v_pool")},
            "k is bf16[5, 2, 16], k_pool bf16[9, 4, 2, 16] wants",
        ),
        ({"slots": jnp.zeros(4, jnp.int32)}, "slots is i32[4], wanted shape [5]"),
        ({"slots": jnp.zeros(5, jnp.uint32)}, "slots is u32[5], wanted dtype int32"),
    ],
    ids=["rank", "v_shape", "pools_differ", "layout", "slots_shape", "slots_dtype"],
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.reshape_and_cache(**{**GOOD, **bad})
    assert str(error.value).startswith("reshape_and_cache: ")
