"""Compile the decode chunk or a prefill for an H200; print what was found as one JSON object.

    python -m tests.aot.compile_decode decode qwen3-8b dflash2 --hlo decode.hlo

`test_decode.py` runs this in a process of its own; run it by hand to read the HLO.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax import loop
from dflash_jax.fixed import Fixed, plan
from dflash_jax.options import DecodeOptions
from dflash_jax.sampling import SamplingMode
from dflash_jax.scratch import init_scratch
from dflash_jax.state import init_buffers, init_state
from dflash_jax.weight_layout import turn_weights
from scripts.random_pair import DRAFTERS, SHAPES, pair_configs, params_specs
from tests.aot.h200 import h200, instructions, kernels, top_level

_IN_PLACE = "output_to_operand_aliasing={"
_PALLAS = re.compile(r'op_name="[^"]*/(\w+)/pallas_call"')
_SPARE_PAGES = 4  # pools hold this many times a sequence's pages, so that a gather is no pool


def carriers(
    draft: Any, fixed: Fixed, sampling: SamplingMode | None = None
) -> tuple[Any, Any, Any]:
    """State, buffers and scratch as shapes."""
    return jax.eval_shape(
        lambda: (init_state(fixed, sampling), init_buffers(fixed), init_scratch(draft, fixed=fixed))
    )


def facts_of(compiled: Any, params: Any, carried: Any, vocab: int) -> dict[str, Any]:
    """What the tests assert on, and a census of kernels."""
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    _, buffers, _ = carried
    pools = {x.shape for x in (*buffers.k_pools, *buffers.v_pools)}
    if buffers.gdn is not None:
        pools |= {layer.state.shape for layer in buffers.gdn.layers}
    weights = {x.shape for x in jax.tree.leaves(params) if len(x.shape) == 2}
    pool_bytes = min(nbytes(x) for x in buffers.k_pools)
    every, outer = instructions(hlo), top_level(hlo)
    columns = {i.name: i.shape[-1] if i.shape else 1 for i in every}
    sorted_columns = [columns.get(name, 0) for i in every if i.sorts for name in i.operands]
    return {
        "num_carriers": len(jax.tree.leaves(carried)),
        "num_aliases": len(re.findall(r"(?:may|must)-alias", hlo.split("\n", 1)[0])),
        "carrier_bytes": sum(map(nbytes, jax.tree.leaves(carried))),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_bytes": pool_bytes,
        # A scatter or a kernel that writes rows into a pool has the pool's shape; it runs in place.
        # Logits are counted by their rows below.
        "large": sorted(
            f"{i.op} {i.dtype}{list(i.shape)} {i.name}"
            for i in outer
            if i.nbytes >= pool_bytes
            and not (i.shape in pools and ("scatter" in i.name or _IN_PLACE in i.text))
            and i.shape[-1] != vocab
        ),
        "copied": sorted(
            f"{i.op} {i.dtype}{list(i.shape)} {i.name}"
            for i in outer
            if i.op in ("copy", "transpose", "convert") and i.shape in pools | weights
        ),
        "num_gated_delta_rows": sum("/gated_delta_rows/pallas_call" in i.text for i in outer),
        "sorted_columns": max(sorted_columns, default=0),
        "vocabulary_rows": max(
            (math.prod(i.shape[:-1]) for i in outer if i.shape and i.shape[-1] == vocab), default=0
        ),
        "pallas": dict(Counter(_PALLAS.findall("\n".join(i.text for i in outer)))),
        "kernels": dict(kernels(hlo).most_common()),
    }


def nbytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("what", choices=("decode", "prefill"))
    parser.add_argument("shapes", choices=SHAPES)
    parser.add_argument("drafter", choices=DRAFTERS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024, help="tokens a sequence, at most")
    parser.add_argument("--chunk", type=int, default=128, help="prompt tokens of a prefill")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--sampling", action="store_true", help="with every option of sampling")
    parser.add_argument("--impl", choices=("auto", "xla", "pallas"), default="auto")
    parser.add_argument("--verify-widths", type=int, nargs="*", default=[], help="to choose from")
    parser.add_argument("--hlo", type=Path, help="also write the HLO there")
    args = parser.parse_args(argv)
    device = h200()
    target, draft = pair_configs(args.shapes, args.drafter)
    fixed = plan(
        target,
        draft,
        batch=args.batch,
        max_context=args.context,
        num_pages=_SPARE_PAGES * args.batch * -(-args.context // args.page_size),
        prefill_chunk=args.chunk,
        page_size=args.page_size,
    )
    mode = SamplingMode(**dict.fromkeys(SamplingMode.__slots__, True)) if args.sampling else None
    params, carried = params_specs(target, draft), carriers(draft, fixed, mode)
    if args.impl != "pallas":  # as `weight_layout.laid_out` has it on the device
        params = jax.eval_shape(turn_weights, params)
    widths = tuple(args.verify_widths)
    options = DecodeOptions(impl=args.impl, sampling=mode, verify_widths=widths)
    static = {"fixed": fixed, "options": options}
    if args.what == "decode":
        compiled = device.compile(loop.decode, params, *carried, **static)
    else:
        tokens = np.zeros(args.chunk, np.int32)
        scalars = (np.int32(1), np.int32(0), np.int32(-1))
        compiled = device.compile(loop.prefill, params, tokens, *scalars, *carried, **static)
    if args.hlo:
        args.hlo.write_text(compiled.as_text())
    print(json.dumps(facts_of(compiled, params, carried, target.vocab)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
