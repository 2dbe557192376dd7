"""What only a GPU can show: kernels as compiled, graphs run again and again, nothing read back.

Known faults C01 (ragged tiles), C03 (what the backend cannot lower), C05 (other bits in another
run), C09 (a value read back a cycle); C07 and C11 are in `test_costs.py`.
`scripts/gpu_check.py` runs these among its sections.
"""

import jax
import numpy as np
import pytest

import pallas_kernels as pk
from dflash_jax import loop
from dflash_jax.drafters.confidence import with_threshold
from scripts.kernel_ops import OPS, check
from tests import cases, kit

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("op", "case"),
    [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in op.cases],
)
def test_a_kernel_equals_its_oracle_on_the_device(op, case):
    found = check(op, case, "pallas")
    assert found["right"], found


def test_a_kernel_gives_the_same_bits_every_time():
    x, w, residual = cases.make_matmul(cases.MATMUL[2])
    split = pk.SkinnyMatmulConfig(split_k=4)
    run = jax.jit(lambda: pk.skinny_matmul(x, w, residual=residual, impl="pallas", config=split))
    first = np.asarray(run()).tobytes()
    assert all(np.asarray(run()).tobytes() == first for _ in range(20))


def test_jax_triton_agrees_with_the_kernel_where_it_is_installed():
    pytest.importorskip("jax_triton", reason="needs the extra 'triton'")
    x, w, _ = cases.make_matmul(cases.MATMUL[2])
    got, want = (np.asarray(pk.skinny_matmul(x, w, impl=impl)) for impl in ("triton", "pallas"))
    assert np.abs(got.astype(float) - want.astype(float)).max() <= 2.0**-7 * np.abs(want).max()


def _chunk(kind="dflash2"):
    """A decode chunk of four sequences and its carriers after the prefill."""
    params = kit.pair("qwen3", kind, dtype="bfloat16", block=16).params
    if kind == "dspark":  # confidences decide on the device how many drafts are verified
        params = params.replace(draft=with_threshold(params.draft, 0.5))
    fixed = kit.sizes(params, 4, page_size=16, max_context=96)
    return params, fixed, kit.start(params, fixed, kit.ragged(4))[1]


def test_a_chunk_run_again_has_the_same_bits():
    """A conditional graph node was reported to crash, or to go wrong, in its second execution."""
    params, fixed, at = _chunk()
    first = None
    for _ in range(50):
        again = jax.tree.map(lambda x: x.copy(), at)
        out, *_ = loop.decode(params, *again, fixed=fixed, options=kit.OPTIONS)
        bits = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(out))]
        first = first or bits
        assert bits == first


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_chunk_reads_nothing_back_to_the_host(kind):
    params, fixed, at = _chunk(kind)
    out, *at = loop.decode(params, *at, fixed=fixed, options=kit.OPTIONS)  # compiled here
    jax.block_until_ready((out, at))
    with jax.transfer_guard_device_to_host("disallow"):
        out, *at = loop.decode(params, *at, fixed=fixed, options=kit.OPTIONS)
        jax.block_until_ready((out, at))
