"""Compile every kernel at every shape of `tests/cases.py` for an H200; print what came of it.

    python -m tests.aot.compile_kernels paged_attention

One program an op holds all of its cases. `test_kernels.py` runs this in a process of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jax
from kernel_ops import NAMES, OPS, Op

from tests.aot.compile_decode import nbytes
from tests.aot.h200 import H200, h200, top_level


def facts_of(op: Op, device: H200) -> dict[str, Any]:
    """How many kernels an op's program has, and what was copied of the arrays it writes."""
    inputs = [op.make(case) for case in op.cases]
    written = [tuple(one[i] for i in op.donated) for one in inputs]
    rest = [tuple(None if i in op.donated else x for i, x in enumerate(one)) for one in inputs]

    def run(written, rest):
        found = []
        for case, in_place, others in zip(op.cases, written, rest, strict=True):
            in_place = iter(in_place)
            arrays = [next(in_place) if i in op.donated else x for i, x in enumerate(others)]
            found.append(op.call(case, "pallas")(*arrays))
        return found

    compiled = device.compile(jax.jit(run, donate_argnums=0), written, rest)
    hlo = compiled.as_text()
    shapes = {x.shape for x in jax.tree.leaves(written)}
    return {
        "cases": len(op.cases),
        "kernels": hlo.count('custom_call_target="__gpu$xla.gpu.triton"'),
        "copied": sorted(
            f"{i.op} {i.dtype}{list(i.shape)}"
            for i in top_level(hlo)
            if i.op in ("copy", "transpose") and i.shape in shapes
        ),
        "written_bytes": sum(map(nbytes, jax.tree.leaves(written))),
        "alias_bytes": compiled.memory_analysis().alias_size_in_bytes,
    }


def main(names: list[str]) -> int:
    device = h200()
    chosen = [op for op in OPS if op.name in (names or NAMES)]
    print(json.dumps({op.name: facts_of(op, device) for op in chosen}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
