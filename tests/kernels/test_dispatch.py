"""What holds for every op: how `impl` is read, and what importing the package does not do."""

import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_kernels as pk
from pallas_kernels._launch import dispatch

POOL = jnp.zeros((3, 2, 4, 16))
ROWS = jnp.zeros((2, 2, 16))
VALS, IDS = jnp.zeros((1, 2, 16)), jnp.zeros((1, 2, 16), jnp.int32)
CODEBOOK = jnp.zeros((20, 4))
GATES = jnp.zeros((1, 2, 2))

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
    "norm_rope_cache": partial(
        pk.norm_rope_cache,
        jnp.zeros((2, 8 * 16)),
        jnp.ones((2, 8)),
        jnp.zeros((2, 8)),
        (POOL,),
        (POOL,),
        jnp.arange(2, dtype=jnp.int32),
        num_heads=4,
    ),
    "dynamic_conv": partial(
        pk.dynamic_conv, jnp.zeros((1, 2, 16)), jnp.zeros((1, 2, 2, 4)), jnp.zeros((2, 16))
    ),
    "gated_delta_rows": partial(
        pk.gated_delta_rows,
        jnp.zeros((1, 2, 64)),
        GATES,
        GATES,
        jnp.ones(1, jnp.int32),
        jnp.zeros((1, 2, 16, 16)),
        jnp.zeros(1, jnp.int32),
        jnp.zeros((1, 2, 48)),
        GATES,
        GATES,
        jnp.zeros(1, jnp.int32),
        num_key_heads=1,
    ),
    "top16": partial(pk.top16, jnp.zeros((2, 20))),
    "greedy_rows": partial(pk.greedy_rows, jnp.zeros((2, 20))),
    "markov_argmax": partial(
        pk.markov_argmax, jnp.zeros((2, 3, 20)), jnp.zeros((2, 4)), jnp.zeros((20, 4)), 1
    ),
    "selector_walk": partial(
        pk.selector_walk,
        jnp.zeros(1, jnp.int32),
        VALS,
        IDS,
        jnp.zeros((1, 2, 4)),
        CODEBOOK,
        CODEBOOK,
    ),
    "selector_walk_sampled": partial(
        pk.selector_walk_sampled,
        jnp.zeros(1, jnp.int32),
        VALS,
        IDS,
        jnp.zeros((1, 2, 4)),
        CODEBOOK,
        CODEBOOK,
        jnp.zeros(1),
        jnp.zeros((1, 2)),
    ),
    "skinny_matmul": partial(pk.skinny_matmul, jnp.zeros((2, 8)), jnp.zeros((6, 8))),
    "skinny_matmul_swiglu": partial(pk.skinny_matmul_swiglu, jnp.zeros((2, 8)), jnp.zeros((6, 8))),
}
each_op = pytest.mark.parametrize("op", CALLS)


@each_op
def test_a_kernel_on_a_machine_without_a_gpu_is_refused_with_what_runs_there(op):
    with pytest.raises(NotImplementedError, match=f"{op}: impl='pallas' .*supported.* 'xla'"):
        CALLS[op](impl="pallas")


@each_op
def test_an_unknown_implementation_is_refused_with_the_known_ones(op):
    with pytest.raises(ValueError, match=f"{op}: impl is 'mosaic', wanted one of 'auto', 'xla'"):
        CALLS[op](impl="mosaic")


@each_op
def test_auto_compiles_to_the_xla_form_on_a_cpu(op):
    texts = [
        jax.jit(partial(CALLS[op], impl=impl)).lower().compile().as_text()
        for impl in ("auto", "xla")
    ]
    # Without where an instruction comes from, a table of frames and what refers to it, and without
    # the numbers of constants, which count those that were folded as well.
    origins = re.compile(r", metadata=\{[^}]*\}|^\d+ .*$|(?<=%constant)\.\d+", re.MULTILINE)
    programs = [list(filter(None, origins.sub("", text).splitlines())) for text in texts]
    assert programs[0] == programs[1]


def _double(x_ref, y_ref):
    y_ref[...] = x_ref[...] * 2


@partial(jax.jit, static_argnames=("interpret",))
def _double_kernel(x, *, interpret):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double, out_shape=shape, interpret=interpret)(x)


def _run_double(impl, **options):
    """Twice x by the kernel and three times x by the other form, to tell which of them ran."""
    return dispatch("double", impl, _double_kernel, lambda x: x * 3, jnp.ones(4), **options)


@pytest.mark.parametrize("impl, factor", [("interpret", 2), ("xla", 3), ("auto", 3)])
def test_the_implementation_that_impl_names_runs_on_a_cpu(impl, factor):
    assert (np.asarray(_run_double(impl)) == factor).all()
    assert (np.asarray(jax.jit(partial(_run_double, impl))()) == factor).all()


def test_operands_that_a_kernel_does_not_serve_are_refused_or_go_to_xla_by_auto():
    unserved = "has no kernel for 4 columns, only for 8"
    assert (np.asarray(_run_double("auto", unserved=unserved)) == 3).all()
    with pytest.raises(NotImplementedError, match="double: impl='interpret' has no kernel for 4"):
        _run_double("interpret", unserved=unserved)


def test_importing_the_package_starts_no_backend_and_needs_only_jax():
    program = (
        "import sys, pallas_kernels\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
        "assert 'dflash_jax' not in sys.modules and 'flax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
