"""Where a decode cycle's time goes: its three stages apart, and its kernels by name.

Stages are jitted alone in a loop with a static trip count. Each turn feeds on the one before, so
that the compiler can neither drop a turn nor hoist its work out of the loop.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dflash_jax import drafters
from dflash_jax.commit import commit
from dflash_jax.drafters import Proposal
from dflash_jax.loop import LOOP_OPTIONS, rows_to_run
from dflash_jax.options import DecodeOptions
from dflash_jax.params import Params
from dflash_jax.verify import verify

_TURNS = 8
_stage = partial(
    jax.jit,
    static_argnames=("fixed", "impl"),
    donate_argnames=("buffers", "scratch"),
    compiler_options=LOOP_OPTIONS,  # the loop is one graph, as in a decode
)


@_stage
def _propose_turns(params, state, buffers, scratch, *, fixed, impl):
    def turn(_, carry):
        state, buffers, scratch = carry
        proposal, buffers, scratch = drafters.get(params.draft).propose(
            params,
            state,
            rows_to_run(state, fixed),
            buffers,
            scratch,
            fixed=fixed,
            options=DecodeOptions(impl=impl),
        )
        return state.replace(anchor=proposal.tokens[:, 0]), buffers, scratch

    return lax.fori_loop(0, _TURNS, turn, (state, buffers, scratch))


@_stage
def _verify_turns(params, state, buffers, scratch, *, fixed, impl):
    def turn(_, carry):
        state, buffers, drafts, _ = carry
        rows = rows_to_run(state, fixed)
        found, buffers = verify(
            params,
            Proposal(drafts, rows - 1),
            rows,
            state,
            buffers,
            fixed=fixed,
            options=DecodeOptions(impl=impl),
        )
        state = state.replace(anchor=found.committed[:, 0])
        return state, buffers, found.committed[:, 1:], found.features

    drafts = jnp.zeros((fixed.batch, fixed.num_drafts), jnp.int32)
    rows = rows_to_run(state, fixed)
    found, _ = jax.eval_shape(
        lambda: verify(params, Proposal(drafts, rows), rows, state, buffers, fixed=fixed)
    )
    features = jnp.zeros(found.features.shape, found.features.dtype)
    state, buffers, _, _ = lax.fori_loop(0, _TURNS, turn, (state, buffers, drafts, features))
    return state, buffers, scratch


@_stage
def _commit_turns(params, state, buffers, scratch, *, fixed, impl):
    rows = rows_to_run(state, fixed)
    drafts = jnp.zeros((fixed.batch, fixed.num_drafts), jnp.int32)
    shapes, _ = jax.eval_shape(
        lambda: verify(params, Proposal(drafts, rows), rows, state, buffers, fixed=fixed)
    )
    # Ones that the compiler cannot know: XLA fails to fold a barrier over constants.
    unknown = state.num_steps + 1
    found = jax.tree.map(lambda x: jnp.broadcast_to(unknown, x.shape).astype(x.dtype), shapes)

    def turn(i, carry):
        state, buffers, scratch = carry
        # Without the barrier the features do not change and their product leaves the loop.
        now, _ = lax.optimization_barrier((found, i))
        after, buffers, scratch = commit(
            params, now, state, buffers, scratch, fixed=fixed, impl=impl
        )
        return state.replace(anchor=after.anchor), buffers, scratch

    return lax.fori_loop(0, _TURNS, turn, (state, buffers, scratch))


_STAGES: dict[str, Callable[..., Any]] = {
    "propose": _propose_turns,
    "verify": _verify_turns,
    "commit": _commit_turns,
}


def stage_times(
    params: Params, state: Any, buffers: Any, scratch: Any, *, fixed: Any, impl: str, samples: int
) -> tuple[dict[str, float], tuple[Any, Any]]:
    """Median ms of each stage, and the buffers and scratch, which were donated on the way.

    The next call is launched before the last is waited for, as a decode does. `params.draft` is the
    drafter itself, not an oracle around it.
    """
    times = {}
    for name, run in _STAGES.items():
        ends, waiting = [], state
        for _ in range(samples + 4):  # the first compiles
            after, buffers, scratch = run(params, state, buffers, scratch, fixed=fixed, impl=impl)
            jax.block_until_ready(waiting)
            ends.append(time.perf_counter())
            waiting = after
        jax.block_until_ready(waiting)
        steps = [b - a for a, b in zip(ends, ends[1:], strict=False)][3:]
        times[name] = 1000 * statistics.median(steps) / _TURNS
    return times, (buffers, scratch)


def kernel_table(run: Callable[[], Any], cycles: int, top: int = 25) -> list[dict[str, Any]]:
    """Device time of the kernels of `run()`, by name without numbers, longest first.

    A kernel's own time is right; the gaps between kernels are not those of a decode.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        traces = list(Path(folder).rglob("*.trace.json.gz"))
        if not traces:
            return []
        events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    return sum_kernels(events, cycles, top)


def sum_kernels(events: list[dict[str, Any]], cycles: int, top: int) -> list[dict[str, Any]]:
    """Add up the complete events on GPU streams."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    total, count = defaultdict(float), defaultdict(int)
    for event in events:
        if event.get("ph") != "X" or "GPU" not in processes.get(event["pid"], ""):
            continue
        if not threads.get((event["pid"], event["tid"]), "").startswith("Stream"):
            continue
        name = re.sub(r"_\d+(?=_|$)", "", event["name"])
        total[name] += event["dur"]
        count[name] += 1
    return [
        {
            "kernel": name,
            "us_a_cycle": round(total[name] / cycles, 2),
            "calls_a_cycle": round(count[name] / cycles, 2),
            "us_a_call": round(total[name] / count[name], 2),
        }
        for name in sorted(total, key=total.__getitem__, reverse=True)[:top]
    ]
