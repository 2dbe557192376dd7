"""One decode chunk in the forms that XLA can run it: which is fastest, and whether bits agree.

The loop's length is known (`static`) or ends when every sequence has (`while`); the loop is one
CUDA graph (`graph`) or XLA launches its body's graphs in turn (`default`). `while_graph` is what
ships.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
from decode_runner import Runner
from jax import lax
from random_pair import pair_configs, random_params

from dflash_jax import loop
from dflash_jax.fixed import plan
from dflash_jax.options import DecodeOptions

_CARRIERS = ("state", "buffers", "scratch")


def _jit(function: Callable[..., Any], *, graph: bool) -> Callable[..., Any]:
    return jax.jit(
        function,
        static_argnames=("fixed", "options"),
        donate_argnames=_CARRIERS,
        keep_unused=True,
        compiler_options=loop.LOOP_OPTIONS if graph else {},
    )


_plain_decode = inspect.unwrap(loop.decode)


def _while(params, state, buffers, scratch, *, fixed, options):
    return _plain_decode(params, state, buffers, scratch, fixed=fixed, options=options)


def _static(params, state, buffers, scratch, *, fixed, options):
    """The same chunk with every cycle run: a finished batch commits nothing in the rest of them."""

    def repeat(_, cycle, carry):
        return lax.fori_loop(0, options.cycles, lambda _, x: cycle(x), carry)

    known = SimpleNamespace(**{**vars(lax), "while_loop": repeat})
    with mock.patch.object(loop, "lax", known):
        return _plain_decode(params, state, buffers, scratch, fixed=fixed, options=options)


def forms() -> dict[str, Callable[..., Any]]:
    """Every form by its name."""
    return {
        "while_graph": loop.decode,
        "while_default": _jit(_while, graph=False),
        "static_graph": _jit(_static, graph=True),
        "static_default": _jit(_static, graph=False),
    }


class Bench:
    """One pair in its shapes, batch 1, whose loop is run in every form."""

    def __init__(self, shapes: str, context: int, *, rows: int, impl: str = "auto") -> None:
        target, draft = pair_configs(shapes, "dflash2", rows=rows)
        self.params = random_params(target, draft, impl=impl)
        self.context, self.options = context, DecodeOptions(impl=impl)
        self.fixed = plan(
            target,
            draft,
            batch=1,
            max_context=context + 16 * rows,
            page_size=64,
            prefill_chunk=16,
            dtype="bfloat16",
        )

    def runner(self, decode: Callable[..., Any], cycles: int, certify: bool = False) -> Runner:
        options = replace(self.options, cycles=cycles, certify=certify)
        return Runner(self.params, self.context, self.fixed, options, decode)

    def time(self, decode: Callable[..., Any], cycles: int, chunks: int) -> dict[str, Any]:
        """Median ms a cycle, and how long the form took to compile."""
        run = self.runner(decode, cycles)
        times = run.time_chunks(chunks)
        return {
            "cycles": cycles,
            "cycle_ms": statistics.median(times),
            "low": min(times),
            "high": max(times),
            "compile_s": run.compile_seconds,
        }

    def repeat(self, decode: Callable[..., Any], cycles: int, count: int) -> dict[str, Any]:
        """Run the same chunk `count` times: how many differ from the first in any bit."""
        run = self.runner(decode, cycles, certify=True)
        first, different = None, 0
        for _ in range(count):
            record = jax.device_get(run.chunk(run.start())[0])
            bits = [np.asarray(x).tobytes() for x in (record.tokens, record.hashes)]
            first = first or bits
            different += bits != first
        return {"executions": count, "different": different, "bits": first}

    def launches(self, cycle_ms: float) -> dict[str, Any]:
        """Kernels of a cycle, the time the device is busy with them, and what is left over."""
        rows = self.runner(loop.decode, 1).kernels(top=10_000)
        busy = sum(row["us_a_cycle"] for row in rows) / 1000
        return {
            "kernels_a_cycle": sum(row["calls_a_cycle"] for row in rows),
            "busy_ms": busy,
            "cycle_ms": cycle_ms,
            "longest": rows[:20],
        }
