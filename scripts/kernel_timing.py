"""How long one call of a kernel takes on inputs that are not in the L2, in JAX and in PyTorch.

JAX: one program holds a loop with a static trip count over several unrolled calls, each on inputs
of its own, 150 MB of them together against 60 MB of L2 on an H200. A barrier ties a call's inputs
to the output of the call before it, so that calls neither overlap nor leave the loop, and costs no
kernel. The loop is one CUDA graph, as in a decode. PyTorch: the same calls in one CUDA graph.

What the loop itself costs, 2 to 5 us an iteration, is part of the figure: under 0.5 us a call.
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

COLD_BYTES = 150_000_000
_MIN_CALLS, _MAX_SETS = 8, 40
_SAMPLE_MS = 4.0  # of calls between two looks at the clock
_GRAPH = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
OPTIONS = {
    "xla_gpu_enable_command_buffer": _GRAPH,
    "xla_gpu_command_buffer_scheduling_mode": "SERIALIZE",
}


class Timing(NamedTuple):
    """Microseconds a call: the median of the samples, and their ends."""

    us: float
    low: float
    high: float
    calls: int  # a sample


def sets_needed(bytes_a_set: int, is_smoke: bool) -> int:
    """How many input sets keep every call's inputs out of the L2."""
    return 2 if is_smoke else max(1, min(_MAX_SETS, math.ceil(COLD_BYTES / max(bytes_a_set, 1))))


def looped(call: Callable[..., Any], unrolled: int, turns: int, carried: int) -> Callable[..., Any]:
    """The program that is timed: (heads, tails, outputs) -> (heads, outputs).

    Heads are the first `carried` inputs of each set, which a call writes in place; tails the rest.
    """

    def run(heads, tails, outputs):
        def turn(_, carry):
            heads, outputs = map(list, carry)
            for i in range(unrolled):
                at = i % len(heads)
                before = (heads[at], tails[at]), outputs[i - 1]
                (head, tail), outputs[i - 1] = lax.optimization_barrier(before)
                found = call(*head, *tail)
                if carried:
                    heads[at], found = found[:carried], found[carried:]
                outputs[i] = found
            return tuple(heads), tuple(outputs)

        return lax.fori_loop(0, turns, turn, (heads, outputs))

    return run


def time_jax(
    call: Callable[..., Any],
    sets: Sequence[Sequence[Any]],
    *,
    expected_us: float,
    samples: int,
    carried: int = 0,
    least_calls: int = _MIN_CALLS,
) -> Timing:
    """Time `call(*inputs)`, which returns a tuple, over rotated inputs.

    Args:
      call: of one set of inputs.
      sets: inputs, one tuple a rotation.
      expected_us: of a call, for the number of turns a sample takes.
      carried: the first so many inputs are written in place: outputs of the same place take them.
      least_calls: in a turn.
    """
    unrolled = _calls_a_turn(len(sets), least_calls)
    turns = max(1, round(1000 * _SAMPLE_MS / (unrolled * expected_us)))
    heads = jax.tree.map(jnp.copy, tuple(tuple(one[:carried]) for one in sets))  # donated
    tails = tuple(tuple(one[carried:]) for one in sets)
    kept = jax.eval_shape(call, *sets[0])[carried:]
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)
    outputs = tuple(zeros() for _ in range(unrolled))
    options = OPTIONS if jax.default_backend() == "gpu" else {}
    jitted = jax.jit(
        looped(call, unrolled, turns, carried), donate_argnums=(0, 2), compiler_options=options
    )
    for _ in range(2):  # the first compiles, the second has its graph
        heads, outputs = jax.block_until_ready(jitted(heads, tails, outputs))
    times = []
    for _ in range(samples):
        start = time.perf_counter()
        heads, outputs = jax.block_until_ready(jitted(heads, tails, outputs))
        times.append(1e6 * (time.perf_counter() - start) / (turns * unrolled))
    return _timing(times, turns * unrolled)


def _calls_a_turn(num_sets: int, least: int) -> int:
    """Each set equally often."""
    return num_sets * max(1, -(-least // num_sets))


def _timing(times: list[float], calls: int) -> Timing:
    return Timing(statistics.median(times), min(times), max(times), calls)


def time_torch(
    call: Callable[..., Any], sets: Sequence[Sequence[Any]], *, samples: int
) -> Timing | None:
    """The same for PyTorch: a CUDA graph of calls over rotated inputs; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    unrolled = _calls_a_turn(len(sets), _MIN_CALLS)

    def run():
        for i in range(unrolled):
            call(*sets[i % len(sets)])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for i in range(samples + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(1e3 * start.elapsed_time(end) / unrolled)
    return _timing(times, unrolled)
