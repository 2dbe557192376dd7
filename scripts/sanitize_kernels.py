"""Run every kernel once at the tests' shapes, for a checker of memory accesses to look at.

    compute-sanitizer --tool memcheck python scripts/sanitize_kernels.py
    compute-sanitizer --tool racecheck python scripts/sanitize_kernels.py --cases 2

Every array gets an allocation of its own, so that a read past its end is one past the allocation.
Prints a line a kernel and, last, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("op", nargs="*", help="ops to run; all of them if none is named")
    parser.add_argument("--cases", type=int, default=3, help="smallest cases of each op")
    parser.add_argument("--impl", choices=("pallas", "interpret", "xla"), default="pallas")
    args = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout without installing
    import jax
    from kernel_ops import NAMES, OPS, check

    if unknown := set(args.op) - set(NAMES):
        parser.error(f"no op {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    found: list[dict[str, Any]] = []
    for op in (op for op in OPS if op.name in (args.op or NAMES)):
        size = lambda case, op=op: sum(x.size for x in jax.tree.leaves(op.make(case)))
        for case in sorted(op.cases, key=size)[: args.cases]:
            try:
                found.append(check(op, case, args.impl))
            except NotImplementedError as error:
                found.append({"op": op.name, "case": case.name, "why": str(error)})
            print(op.name, case.name, found[-1].get("right", "no kernel"), flush=True)
    print(json.dumps(found))
    return int(any(one.get("right") is False for one in found))


if __name__ == "__main__":
    sys.exit(main())
