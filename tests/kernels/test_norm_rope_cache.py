"""norm_rope_cache: both forms against the oracle and the layers it replaces, dropped rows, NaN."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dflash_jax import layers
from tests import cases
from tests.kernels.compare import assert_close, assert_same_bits
from tests.reference import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")
EPS = 1e-5


def run(case, inputs, impl, **options):
    *arrays, q_norm, k_norms = inputs
    call = partial(pk.norm_rope_cache, num_heads=case.heads[0], eps=EPS, impl=impl, **options)
    return jax.jit(call)(*arrays, q_norm=q_norm, k_norms=k_norms)


each_case = pytest.mark.parametrize("case", cases.NORM_ROPE, ids=lambda case: case.name)


@each_case
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_every_case_equals_the_oracle(case, impl):
    inputs = cases.make_norm_rope(case)
    got = run(case, inputs, impl)
    q, k_pools, v_pools = ops.norm_rope_cache(*inputs, num_heads=case.heads[0], eps=EPS)
    if case.heads[0]:
        assert got.q.dtype == inputs[0].dtype
        assert_close(got.q, q)
    else:
        assert got.q is None
    for i in range(case.layers):
        assert_close(got.k_pools[i], k_pools[i].astype(np.float64))
        assert_same_bits(got.v_pools[i], v_pools[i])


@pytest.mark.parametrize("case", cases.NORM_ROPE[:4], ids=lambda case: case.name)
def test_the_xla_form_has_the_bits_of_the_layers_that_it_replaces(case):
    inputs = cases.make_norm_rope(case)
    (heads, kv_heads), d = case.heads, case.head_dim
    got = run(case, inputs, "xla")

    @jax.jit
    def want(rows, cos, sin, k_pools, v_pools, slots, q_norm, k_norms):
        norm = lambda x, weight: x if weight is None else layers.rms_norm(x, weight, EPS)
        part = lambda first, n: rows[:, first * d : (first + n) * d].reshape(-1, n, d)
        q = layers.apply_rope(norm(part(0, heads), q_norm), cos, sin) if heads else None
        pools = []
        for i in range(case.layers):
            first = heads + 2 * i * kv_heads
            k = norm(part(first, kv_heads), k_norms and k_norms[i])
            k, v = layers.apply_rope(k, cos, sin), part(first + kv_heads, kv_heads)
            pools.append(pk.reshape_and_cache(k, v, k_pools[i], v_pools[i], slots))
        return q, pools

    q, pools = want(*inputs)
    if heads:
        assert_same_bits(got.q, q)
    for i, (k_pool, v_pool) in enumerate(pools):
        assert_same_bits(got.k_pools[i], k_pool)
        assert_same_bits(got.v_pools[i], v_pool)


LLAMA, VERIFY = cases.NORM_ROPE[:2]
both_forms = pytest.mark.parametrize("impl", ["xla", "interpret"])


@pytest.fixture
def much_optimisation():
    """With little, an interpreted kernel computes a key once for each use, to other last bits."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", jax.config.jax_platforms == "cpu")


@both_forms
def test_kept_keys_and_values_are_those_of_the_pools(impl, much_optimisation):
    rows, cos, sin, k_pools, v_pools, slots, *norms = cases.make_norm_rope(VERIFY)
    inputs = (rows, cos, sin, k_pools, v_pools, slots, *norms)
    got = run(VERIFY, inputs, impl, keep_kv=True)
    for row, slot in enumerate(slots):
        if slot >= 0:
            at = slot // VERIFY.page_size, slice(None), slot % VERIFY.page_size
            assert_same_bits(got.k[row], np.asarray(got.k_pools[0])[at])
            assert_same_bits(got.v[row], np.asarray(got.v_pools[0])[at])
    assert np.isfinite(got.k).all() and (slots < 0).any()


@both_forms
def test_dropped_rows_leave_the_pools_alone(impl):
    rows, cos, sin, k_pools, v_pools, slots, *norms = cases.make_norm_rope(VERIFY)
    slots = np.full_like(slots, -1)
    slots[1] = np.iinfo(np.int32).min
    got = run(VERIFY, (rows, cos, sin, k_pools, v_pools, slots, *norms), impl)
    assert_same_bits(got.k_pools[0], k_pools[0])
    assert_same_bits(got.v_pools[0], v_pools[0])


@both_forms
def test_a_value_that_is_not_finite_is_stored_as_zero_and_its_key_as_nan(impl):
    case = dataclasses.replace(LLAMA, dropped=0)
    rows, *others = cases.make_norm_rope(case)
    heads, kv_heads = case.heads
    for row, value in enumerate((np.nan, np.inf, -np.inf)):
        rows[row, (heads + kv_heads) * case.head_dim + 7] = value  # value head 0, dim 7
    got = run(case, (rows, *others), impl, keep_kv=True)
    k_pool, v_pool = np.asarray(got.k_pools[0]), np.asarray(got.v_pools[0])
    for slot in others[4]:
        at = slot // case.page_size, 0, slot % case.page_size, 7
        assert np.isnan(k_pool[at]) and v_pool[at] == 0
    assert np.isnan(k_pool).sum() == 3 and np.isfinite(v_pool).all()
    assert np.isfinite(got.k).all()  # the rows that come back are as the model computed them


def test_the_kernel_gives_a_row_the_same_bits_in_any_batch():
    case = dataclasses.replace(VERIFY, dropped=0)
    rows, cos, sin, k_pools, v_pools, slots, *norms = cases.make_norm_rope(case)
    want = run(case, (rows, cos, sin, k_pools, v_pools, slots, *norms), "interpret")
    part = slice(2, 4)
    few = (rows[part], cos[part], sin[part], k_pools, v_pools, slots[part], *norms)
    got = run(case, few, "interpret")
    assert_same_bits(got.q, np.asarray(want.q)[part])


def test_vmap_over_requests_equals_a_loop_over_them():
    stacked = [cases.make_norm_rope(LLAMA, seed)[:6] for seed in range(2)]
    arrays = jax.tree.map(lambda *x: np.stack(x), *stacked)
    call = partial(pk.norm_rope_cache, num_heads=LLAMA.heads[0], impl="interpret")
    got = jax.jit(jax.vmap(call))(*arrays)
    for i, inputs in enumerate(stacked):
        want = run(LLAMA, (*inputs, None, None), "interpret")
        jax.tree.map(lambda x, y, i=i: assert_same_bits(x[i], y), got, want)


GOOD = {
    "rows": jnp.zeros((5, 8 * 16), jnp.bfloat16),
    "cos": jnp.zeros((5, 8)),
    "sin": jnp.zeros((5, 8)),
    "k_pools": (jnp.zeros((9, 2, 4, 16), jnp.bfloat16),),
    "v_pools": (jnp.zeros((9, 2, 4, 16), jnp.bfloat16),),
    "slots": jnp.zeros(5, jnp.int32),
    "num_heads": 4,
}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"num_heads": 5}, "rows is bf16[5, 128], wanted at least 144 columns for 5 query heads"),
        ({"rows": jnp.zeros((5, 128), jnp.int32)}, "rows is i32[5, 128], wanted one of"),
        ({"cos": jnp.zeros((5, 9)), "sin": jnp.zeros((5, 9))}, "wanted at most 8 columns"),
        ({"sin": jnp.zeros((4, 8))}, "sin is f32[4, 8], wanted shape [5, 8]"),
        ({"cos": jnp.zeros((5, 8), jnp.bfloat16)}, "cos is bf16[5, 8], wanted dtype float32"),
        ({"slots": jnp.zeros(4, jnp.int32)}, "slots is i32[4], wanted shape [5]"),
        ({"v_pools": ()}, "1 k_pools and 0 v_pools, wanted one a layer"),
        ({"q_norm": jnp.zeros(8)}, "q_norm is f32[8], wanted shape [16]"),
        ({"k_norms": (jnp.zeros(16),) * 2}, "2 k_norms for 1 layers, wanted one each"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_wrong_argument_is_one_sentence(bad, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        pk.norm_rope_cache(**{**GOOD, **bad})
    assert str(error.value).startswith("norm_rope_cache: ")


def test_keys_and_values_of_several_layers_cannot_be_kept():
    pools = {name: GOOD[name] * 2 for name in ("k_pools", "v_pools")}
    with pytest.raises(ValueError, match="keep_kv with 2 layers, wanted one"):
        pk.norm_rope_cache(**{**GOOD, **pools, "num_heads": 0}, keep_kv=True)
