"""The same decode cycle in PyTorch, so that a ratio can come from one run on one machine.

Random weights in the shapes of Qwen3-4B or 8B, or of the hybrids Qwen3.5-4B or Qwen3.8-27B, and a
5-layer DFlash (or DFlash2) drafter, bf16.
One cycle is what `dflash_jax.loop.decode` does in one: the context keys and values of the rows
committed last, a block of rows through the drafter, its head and choice, the same rows through the
target, the head, the argmax, acceptance, and the new lengths; all on the device with static shapes,
caches written in place, captured as one CUDA graph.

It is meant as a strong baseline: `torch.compile` for everything between the matrix products (one
compiled layer is called by all layers of target and drafter, so that Inductor compiles it once),
residual add and the next norm in one kernel, one product for the context keys and values of all
drafter layers, masks made once a cycle, and of several attention kernels the fastest at the asked
length. A hybrid's rows run through one Triton kernel that leaves the state behind every row, as
serving engines do (`torch_gdn.py`), or where it does not run by the operations that Inductor makes
of one row after another. The context is random keys and values, not a prefill: it costs the same
to read.

    python scripts/bench_torch.py --shapes qwen3-8b --context 1024 --drafter dflash

`check_torch_cycle.py` compares the same cycle with a forward without caches. Progress goes to
stderr; the last line of stdout is one JSON object.
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config
from torch_cycle import (
    attend,
    compiler,
    locate_rows,
    make_cycle,
    make_gdn_state,
    random_tensor,
)
from torch_gdn import rule_named
from torch_shapes import CYCLES_A_SAMPLE, SHAPES, Setting, Shapes


def say(text: str) -> None:
    print(f"bench_torch: {text}", file=sys.stderr, flush=True)


def capture(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `run`, after three calls that compile it and fill the allocator."""
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
    return graph


def time_graph(
    graph: torch.cuda.CUDAGraph, rewind: Callable[[], None], samples: int, replays: int
) -> list[float]:
    """ms a replay, one figure a sample."""
    times = []
    for i in range(samples + 3):
        rewind()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / replays)
    return times


def use_backends(kind: str) -> None:
    """Let scaled_dot_product_attention reach the kernels that `kind` means, and no other."""
    torch.backends.cuda.enable_flash_sdp(False)  # takes no mask
    torch.backends.cuda.enable_math_sdp(kind not in ("fold", "cudnn"))
    torch.backends.cuda.enable_mem_efficient_sdp(kind != "cudnn")
    torch.backends.cuda.enable_cudnn_sdp(kind == "cudnn")


def probe_attention(setting: Setting, like: Any, kinds: list[str]) -> dict[str, float]:
    """us a call of each attention form over 24 layers' caches (past the L2), those that run."""
    model, (device, dtype) = setting.model, like
    shape = (setting.batch, model.kv_heads, setting.capacity, model.head_dim)
    count = max(2, min(24, (1 << 33) // (2 * 2 * torch.Size(shape).numel())))
    caches = [[random_tensor(*shape, like=like) for _ in range(2)] for _ in range(count)]
    q = random_tensor(setting.batch, setting.rows, model.heads, model.head_dim, like=like)
    start = torch.full((setting.batch,), setting.context, device=device)
    times = {}
    for kind in kinds:
        fold = model.heads // model.kv_heads if kind == "fold" else 1
        rows = locate_rows(start, setting.rows, True, fold, setting.capacity, model, dtype)
        use_backends(kind)
        one = torch.compile(attend, fullgraph=True, dynamic=False)

        def run(one=one, rows=rows, kind=kind) -> None:
            for k, v in caches:
                one(q, k, v, rows, kind)

        try:
            samples = time_graph(capture(run), lambda: None, 10, 2)
        except Exception as error:  # a candidate that this torch cannot run is reported, not fatal
            say(f"attention {kind}: not available here ({type(error).__name__}: {error!s:.200})")
            torch.cuda.synchronize()
            continue
        times[kind] = 1000 * statistics.median(samples) / count
        say(f"attention {kind}: {times[kind]:.1f} us a layer")
    return times


def choose_rule(setting: Setting, like: Any, asked: str) -> str:
    """The form of a hybrid's delta rule: the asked one, or Triton's where it runs."""
    c = setting.model.recurrent
    if c is None or asked != "auto":
        return asked if c is not None else ""
    try:
        carried = make_gdn_state(setting, c, like)
        exact = (like[0], torch.float32)
        shape = setting.batch, setting.rows
        mixed = random_tensor(*shape, c.conv_width, like=like)
        g, beta = (random_tensor(*shape, c.value_heads, like=exact).abs() for _ in range(2))
        kept = torch.ones(setting.batch, dtype=torch.int64, device=like[0])
        states = carried.states.clone()
        wanted = rule_named("unrolled")(mixed, -g, beta, states, kept, c)
        rule = torch.compile(rule_named("triton"), fullgraph=True, dynamic=False)
        torch.testing.assert_close(
            rule(mixed, -g, beta, carried.states, kept, c), wanted, rtol=1e-3, atol=1e-5
        )
        torch.testing.assert_close(carried.states, states, rtol=1e-3, atol=1e-5)
    except Exception as error:  # reported, and there is another form
        say(f"recurrence triton: not available here ({type(error).__name__}: {error!s:.200})")
        return "unrolled"
    return "triton"


def weight_bytes(model: Shapes, drafter: str) -> int:
    """Bytes of weights one cycle reads, each once (the embedding only when it is the head)."""
    width, head = model.width, model.vocab * model.width
    total = model.attention_layers * layer_size(model) + head
    if model.recurrent is not None:
        rows = model.recurrent.in_width + model.recurrent.value_width + 3 * model.ffn
        total += (model.layers - model.attention_layers) * width * rows
    if drafter != "none":
        kv = model.drafter.kv_heads * model.drafter.head_dim
        total += model.draft_layers * layer_size(model.drafter)
        total += model.draft_layers * 2 * kv * width  # the context's k and v rows again
        total += len(model.taps) * width * width + head
    return 2 * total


def layer_size(model: Shapes) -> int:
    """Weights of an attention layer."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.width * ((2 + model.has_gate) * q + 2 * kv + 3 * model.ffn)


def measure(setting: Setting, attention: str, samples: int, recurrence: str) -> dict[str, Any]:
    """Build, compile, capture and time one setting on the current GPU."""
    torch.manual_seed(0)
    like = (torch.device("cuda"), torch.bfloat16)
    torch._inductor.config.assert_indirect_indexing = False  # ids and positions are our own
    began = time.perf_counter()
    kinds = ["fold", "cudnn", "flex"] if attention == "auto" else [attention]
    probed = probe_attention(setting, like, kinds)
    if not probed:
        raise RuntimeError(f"bench_torch: no attention form of {', '.join(kinds)} ran")
    kind = min(probed, key=probed.__getitem__)
    setting = replace(setting, recurrence=choose_rule(setting, like, recurrence))
    torch.cuda.empty_cache()
    use_backends(kind)
    cycle = make_cycle(setting, like, kind, compiler(setting.mode), setting.accept)
    graphs, times = {}, {}
    for name, run in (("cycle", cycle.run), ("propose", cycle.propose), ("verify", cycle.verify)):
        cycle.rewind()  # the calls before a capture move the lengths on
        graphs[name] = capture(run)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - began
    say(f"compiled and captured in {compile_s:.1f} s")
    for name, graph in graphs.items():
        replays = 1 if name == "propose" and cycle.drafter is None else CYCLES_A_SAMPLE
        times[name] = time_graph(graph, cycle.rewind, samples, replays)
    if not torch.isfinite(cycle.state.features).all():
        raise RuntimeError("bench_torch: the target's features are not finite")
    return {
        **{f"{name}_ms": round(statistics.median(ms), 4) for name, ms in times.items()},
        "cycle_ms_min": round(min(times["cycle"]), 4),
        "cycle_ms_max": round(max(times["cycle"]), 4),
        "attention": kind,
        "recurrence": setting.recurrence,
        "attention_us": {name: round(us, 2) for name, us in probed.items()},
        "compile_s": round(compile_s, 1),
        "weight_gb": round(weight_bytes(setting.model, setting.drafter) / 1e9, 3),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "unique_graphs": int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
        "device": torch.cuda.get_device_name(),
    }


def table(figures: dict[str, Any]) -> str:
    names = ("shapes", "drafter", "batch", "context", "attention", "mode")
    head = "  ".join(f"{name}={figures[name]}" for name in names)
    parts = "  ".join(f"{part} {figures[part + '_ms']:.3f}" for part in ("propose", "verify"))
    return f"{head}\ncycle {figures['cycle_ms']:.3f} ms  ({parts})"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=16, help="rows of a block, anchor included")
    parser.add_argument("--drafter", choices=("dflash", "dflash2", "none"), default="dflash")
    parser.add_argument("--accept", type=int, default=5, help="drafts accepted a cycle (forced)")
    parser.add_argument("--iters", type=int, default=20, help="samples; the median is reported")
    modes = ("default", "max-autotune-no-cudagraphs", "eager")
    parser.add_argument("--mode", choices=modes, default="default", help="of torch.compile")
    forms = ("auto", "fold", "gqa", "cudnn", "flex")
    parser.add_argument("--attention", choices=forms, default="auto", help="auto: the fastest here")
    rules = ("auto", "triton", "unrolled")
    parser.add_argument("--recurrence", choices=rules, default="auto", help="of a hybrid's layers")
    args = parser.parse_args(argv)
    if not 0 <= args.accept < args.rows:
        parser.error(f"--accept {args.accept}: wanted 0 to {args.rows - 1}, the drafts of a block")
    if min(args.batch, args.iters) < 1 or args.context < args.rows or args.rows < 2:
        parser.error("--batch and --iters start at 1, --rows at 2, --context at --rows")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    setting = Setting(
        args.shapes, args.batch, args.context, args.rows, args.drafter, args.accept, args.mode
    )
    facts = {"side": "torch", "torch": torch.__version__, "dtype": "bfloat16", **asdict(setting)}
    with torch.no_grad():
        facts |= measure(setting, args.attention, args.iters, args.recurrence)
    print(table(facts))
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
