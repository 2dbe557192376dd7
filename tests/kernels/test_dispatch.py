"""What holds for every op: how `impl` is read, and what importing the package does not do."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk

POOL = jnp.zeros((3, 2, 4, 16))
ROWS = jnp.zeros((2, 2, 16))
VALS, IDS = jnp.zeros((1, 2, 16)), jnp.zeros((1, 2, 16), jnp.int32)
CODEBOOK = jnp.zeros((20, 4))

CALLS = {
    "paged_attention": partial(
        pk.paged_attention,
        jnp.zeros((1, 2, 4, 16)),
        POOL,
        POOL,
        jnp.zeros((1, 2), jnp.int32),
        jnp.zeros((1, 3), jnp.uint32),
        is_causal=True,
    ),
    "reshape_and_cache": partial(
        pk.reshape_and_cache, ROWS, ROWS, POOL, POOL, jnp.arange(2, dtype=jnp.int32)
    ),
    "dynamic_conv": partial(
        pk.dynamic_conv, jnp.zeros((1, 2, 16)), jnp.zeros((1, 2, 2, 4)), jnp.zeros((2, 16))
    ),
    "top16": partial(pk.top16, jnp.zeros((2, 20))),
    "selector_walk": partial(
        pk.selector_walk,
        jnp.zeros(1, jnp.int32),
        VALS,
        IDS,
        jnp.zeros((1, 2, 4)),
        CODEBOOK,
        CODEBOOK,
    ),
    "skinny_matmul": partial(pk.skinny_matmul, jnp.zeros((2, 8)), jnp.zeros((6, 8))),
    "skinny_matmul_swiglu": partial(pk.skinny_matmul_swiglu, jnp.zeros((2, 8)), jnp.zeros((6, 8))),
}
each_op = pytest.mark.parametrize("op", CALLS)


@each_op
@pytest.mark.parametrize("impl", ["pallas", "interpret"])
def test_an_implementation_that_does_not_exist_raises_and_names_what_does(op, impl):
    with pytest.raises(NotImplementedError, match=f"{op}: impl='{impl}' .*'auto' and 'xla'"):
        CALLS[op](impl=impl)


@each_op
def test_an_unknown_implementation_is_refused_with_the_known_ones(op):
    with pytest.raises(ValueError, match=f"{op}: impl is 'triton', wanted one of 'auto', 'xla'"):
        CALLS[op](impl="triton")


@each_op
def test_auto_traces_to_the_xla_form_on_a_cpu(op):
    traced = [str(jax.make_jaxpr(partial(CALLS[op], impl=impl))()) for impl in ("auto", "xla")]
    assert traced[0] == traced[1]


def test_importing_the_package_starts_no_backend_and_needs_only_jax():
    program = (
        "import sys, pallas_kernels\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
        "assert 'dflash_jax' not in sys.modules and 'flax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
