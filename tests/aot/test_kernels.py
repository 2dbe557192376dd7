"""Every kernel at every shape of the tests, compiled for an H200 without one."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.aot.h200 import missing_reason

OPS = (
    "paged_attention",
    "reshape_and_cache",
    "norm_rope_cache",
    "dynamic_conv",
    "dynamic_conv_fused",
    "top16",
    "greedy_rows",
    "markov_argmax",
    "selector_walk",
    "selector_walk_sampled",
    "skinny_matmul",
    "skinny_matmul_swiglu",
    "gated_delta_rows",
    "delta_rule_tiles",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or ""),
]


@cache
def compiled() -> dict:
    """Facts about every op, from a process of its own."""
    command = [sys.executable, "-m", "tests.aot.compile_kernels"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_is_compiled_for_every_case(op):
    facts = compiled()[op]
    assert facts["kernels"] >= facts["cases"]


@pytest.mark.parametrize("op", OPS)
def test_what_a_kernel_writes_in_place_is_neither_copied_nor_moved(op):
    facts = compiled()[op]
    assert facts["copied"] == []
    assert facts["alias_bytes"] >= facts["written_bytes"]


def test_no_op_is_left_out():
    assert set(compiled()) == set(OPS)
