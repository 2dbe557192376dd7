"""Time decode cycles at published shapes with random weights and a forced acceptance.

The cycle is `dflash_jax.loop.decode`'s own, the one behind the CLI, over a DFlash or DFlash2
drafter that does all of its work before an oracle replaces its drafts: exactly `--accept` of them
are accepted. The oracle's tokens are the target's own, decoded plainly by the same executable
first. The context is not prefilled: `seq_lens` are set over pools of random keys and values in
shuffled pages, which costs a cycle the same. Every chunk starts again at the asked context.

    python scripts/bench_decode.py --config qwen3-8b:dflash:1:1024 --torch --parts
    python scripts/bench_decode.py --matrix full --torch --parts 2 --minutes 8.5 --out decode.json
    python scripts/bench_decode.py --matrix full --minutes 8.5 --skip decode.json --out more.json

A configuration is SHAPES:DRAFTER:BATCH:CONTEXT; drafter `none` is plain decoding, one row a step.
`dspark` drafts at most 7 tokens and `mtp` 3, of which `--accept` takes no more than there are.
`--torch` first times `bench_torch.py` on the same work, which has neither of these. With
`--minutes`, nothing is started that would not end in time, judged by what the ones before it took;
a matrix has its most important configurations first, and what was not run is listed. A
configuration that fails is reported as such and the next one runs. Results are also written to
`--out` after each one; the last line of stdout is one JSON object. `write_benchmarks.py` makes
tables of `docs/benchmarks.md` from them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BYTES_A_MS = 4.3e9  # of a large copy on an H200
_DRAFTERS = ("dflash", "dflash2", "dspark", "mtp", "none")
_OF_TORCH = ("dflash", "dflash2")  # what bench_torch.py has
_SMALL = (
    "qwen3-8b:dflash:1:1024",
    "qwen3-8b:dflash2:1:1024",
    "qwen3-8b:none:1:1024",
    "qwen3-8b:dflash:8:1024",
    "qwen3-8b:dflash:1:4096",
)
_NEXT = (
    "qwen3-8b:dflash:32:1024",
    "qwen3-8b:dflash:1:16384",
    "qwen3-4b:dflash:1:1024",
    "qwen3-4b:dflash2:1:1024",
    "qwen3-8b:dflash:8:4096",
    "qwen3-8b:dflash2:8:1024",
    "qwen3-8b:dflash2:32:1024",
)
_ALL = tuple(
    f"{shapes}:{drafter}:{batch}:{context}"
    for shapes in ("qwen3-8b", "qwen3-4b")
    for context in (1024, 4096, 16384)
    for batch in (1, 8, 32)
    for drafter in ("dflash", "dflash2")
)
_HYBRID = tuple(
    f"{shapes}:dflash2:{batch}:1024" for shapes in ("qwen3.5-4b", "qwen3.8-27b") for batch in (1, 8)
) + ("qwen3.5-4b:dflash2:1:16384", "qwen3.5-4b:none:1:1024", "qwen3.8-27b:none:1:1024")
_CHAINED = tuple(
    f"{shapes}:{drafter}:{batch}:1024"
    for batch in (1, 8)
    for shapes in ("qwen3-8b", "qwen3.5-4b", "qwen3.8-27b")
    for drafter in ("dspark", "mtp")
)
MATRICES = {
    "chained": _CHAINED,
    "hybrid": _HYBRID,
    "small": _SMALL,
    "full": tuple(dict.fromkeys((*_SMALL, *_NEXT, *_ALL))),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration."""

    shapes: str
    drafter: str
    batch: int
    context: int

    @staticmethod
    def parse(text: str) -> Setting:
        try:
            shapes, drafter, *sizes = text.split(":")
            batch, context = map(int, sizes)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not SHAPES:DRAFTER:BATCH:CONTEXT, such as qwen3-8b:dflash:1:1024"
            ) from None
        if drafter not in _DRAFTERS or min(batch, context) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r}: drafter is one of {', '.join(_DRAFTERS)}, batch and context start at 1"
            )
        return Setting(shapes, drafter, batch, context)

    def __str__(self) -> str:
        return f"{self.shapes}:{self.drafter}:{self.batch}:{self.context}"


def say(text: str) -> None:
    print(f"bench_decode: {text}", file=sys.stderr, flush=True)


class Bench:
    """Our side: one pair's weights at a time on the device, configurations one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.pair: tuple[str, str] | None = None
        self.params: Any = None
        self.parts_left: int = args.parts

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Figures of one configuration."""
        import jax
        from decode_runner import Runner
        from random_pair import state_bytes

        from dflash_jax.drafters import oracle_drafter
        from dflash_jax.fixed import plan
        from dflash_jax.options import DecodeOptions

        args = self.args
        self._load(setting)
        params = self.params
        is_plain = setting.drafter == "none"
        accept = 0 if is_plain else min(args.accept, params.draft.config.max_drafts)
        room = args.cycles * (accept + 1) + (1 if is_plain else args.rows)
        fixed = plan(
            params.target.config,
            params.draft.config,
            batch=setting.batch,
            max_context=setting.context + room,
            page_size=args.page_size,
            prefill_chunk=16,
            dtype=args.dtype,
        )
        options = DecodeOptions(cycles=args.cycles, impl=args.impl)
        run = Runner(params, setting.context, fixed, options)
        if not is_plain:
            tokens = run.continue_plainly(room)
            forced = oracle_drafter(
                tokens, num_drafts=fixed.num_drafts, poison_at=accept, inner=params.draft
            )
            run.params = params.replace(draft=forced)
        times = run.time_chunks(args.chunks)
        accepted = run.accepted()
        if accepted != {accept}:
            raise RuntimeError(f"{setting}: {accepted} drafts were accepted, {accept} were forced")
        figures = {
            **asdict(setting),
            "cycle_ms": statistics.median(times),
            "cycle_ms_min": min(times),
            "cycle_ms_max": max(times),
            "accepted": accept,
            "compile_s": run.compile_seconds,
            "temp_gb": run.temp_bytes / 1e9,
            "chunks": len(times),
        }
        states = state_bytes(run.buffers)
        figures |= _limit(params, setting, fixed, states, figures["cycle_ms"])
        figures["tokens_per_s"] = 1000 * setting.batch * (accept + 1) / figures["cycle_ms"]
        if args.tau:
            figures["tokens_per_s_at_tau"] = {
                str(tau): round(1000 * setting.batch * tau / figures["cycle_ms"], 1)
                for tau in args.tau
            }
        if run.plain_ms is not None:
            figures["plain_same_executable_ms"] = run.plain_ms
        if args.profile:
            figures["kernels"] = run.kernels()
        if self.parts_left > 0 and not is_plain:
            self.parts_left -= 1
            run.params = params
            figures |= run.stages(args.chunks)
        run.free()
        jax.clear_caches()
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in figures.items()
        }

    def forget(self) -> None:
        """Drop the weights, so that a configuration that failed leaves nothing behind."""
        import jax

        self.pair = self.params = None
        jax.clear_caches()

    def _load(self, setting: Setting) -> None:
        """Random weights of the pair, made on the device; those of the last pair are dropped."""
        import jax
        from random_pair import pair_configs, random_params

        if self.pair == (setting.shapes, setting.drafter):
            return
        self.params = None
        target, draft = pair_configs(setting.shapes, setting.drafter, rows=self.args.rows)
        self.params = random_params(target, draft, dtype=self.args.dtype, impl=self.args.impl)
        jax.block_until_ready(self.params)
        self.pair = (setting.shapes, setting.drafter)


def _limit(
    params: Any, setting: Setting, fixed: Any, states: int, cycle_ms: float
) -> dict[str, float]:
    """The least time the memory allows: weights once, every key and value of the context, and
    recurrent states once in each direction."""
    from random_pair import weight_bytes

    weights = weight_bytes(params)
    a_key = sum(map(_key_bytes, fixed.k_pools))
    if fixed.draft is not None:  # an MTP head reads its own keys for each draft
        a_key += fixed.num_drafts * _key_bytes(fixed.draft.k_pool)
    kv = 2 * setting.batch * setting.context * a_key
    limit = (weights + kv + states) / BYTES_A_MS
    return {
        "weight_gb": weights / 1e9,
        "kv_gb": kv / 1e9,
        "state_gb": states / 1e9,
        "limit_ms": limit,
        "share_of_limit": limit / cycle_ms,
    }


def _key_bytes(spec: Any) -> int:
    """Of one token in a pool."""
    pages, _, page_size, _ = spec.shape
    return spec.nbytes // (pages * page_size)


def run_torch(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """The PyTorch side of a configuration, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("bench_torch.py"))]
    for name in ("shapes", "drafter", "batch", "context"):
        command += [f"--{name}", str(getattr(setting, name))]
    command += ["--rows", str(args.rows), "--accept", str(args.accept), "--mode", args.torch_mode]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=args.torch_timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"over {args.torch_timeout} s"}
    if done.returncode:
        return {"error": f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """What every figure is read with."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "commit": args.commit or _commit(),
        "dtype": args.dtype,
        "rows": args.rows,
        "page_size": args.page_size,
        "cycles_a_chunk": args.cycles,
        "impl": args.impl,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "limit_formula": "(weight bytes + 2 * batch * context * L * K * D * itemsize "
        "+ 2 * recurrent state bytes) / 4.3 TB/s",
    }


def _commit() -> str:
    """The checkout's commit, with a plus sign if files differ from it; "unknown" outside of one."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()


def table(result: dict[str, Any]) -> str:
    """One configuration as lines for a reader."""
    if "error" in result:
        return "{shapes} {drafter} batch {batch} context {context}: {error}".format(**result)
    lines = [
        "{shapes} {drafter} batch {batch} context {context}: cycle {cycle_ms:.3f} ms "
        "({cycle_ms_min:.3f} to {cycle_ms_max:.3f}), limit {limit_ms:.3f} ms, "
        "{share_of_limit:.0%} of it; {tokens_per_s:.0f} tokens/s".format(**result)
    ]
    if "verify_ms" in result:
        names = ("propose", "verify", "commit")
        lines.append("  " + "  ".join(f"{name} {result[name + '_ms']:.3f}" for name in names))
    if "torch" in result and "cycle_ms" in result["torch"]:
        lines.append(
            "  PyTorch {cycle_ms:.3f} ms (propose {propose_ms:.3f} verify {verify_ms:.3f}, "
            "{attention}, {mode})".format(**result["torch"])
            + f", {result['torch_over_ours']:.2f} times ours"
        )
    for row in result.get("kernels", ()):
        lines.append(
            "  {us_a_cycle:9.1f} us  {calls_a_cycle:6.1f} x {us_a_call:8.2f}  {kernel}".format(
                **row
            )
        )
    return "\n".join(lines)


def write(path: Path | None, report: dict[str, Any]) -> None:
    """Replace the results file in one step, so that a time limit loses no earlier result."""
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", type=Setting.parse, action="append", default=[])
    parser.add_argument("--matrix", choices=sorted(MATRICES), help="a set of configurations")
    parser.add_argument("--accept", type=int, default=5, help="drafts accepted a cycle")
    parser.add_argument("--tau", type=float, nargs="*", default=[], help="also tokens/s at these")
    parser.add_argument("--rows", type=int, default=16, help="rows of a block")
    parser.add_argument("--cycles", type=int, default=8, help="cycles a dispatch")
    parser.add_argument("--chunks", type=int, default=10, help="dispatches timed")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--impl", choices=("auto", "xla", "pallas"), default="auto")
    parser.add_argument(
        "--parts",
        type=int,
        nargs="?",
        const=1000,
        default=0,
        metavar="N",
        help="also time the stages apart, of the first N configurations",
    )
    parser.add_argument("--profile", action="store_true", help="also list kernels by device time")
    parser.add_argument("--torch", action="store_true", help="also time bench_torch.py, first")
    modes = ("default", "max-autotune-no-cudagraphs")
    parser.add_argument("--torch-mode", choices=modes, default="default")
    parser.add_argument("--torch-timeout", type=int, default=240, help="seconds")
    parser.add_argument("--minutes", type=float, default=60.0, help="to end within")
    parser.add_argument(
        "--torch-share", type=float, default=0.5, help="of these, the most that PyTorch gets"
    )
    parser.add_argument(
        "--skip",
        type=Path,
        action="append",
        default=[],
        help="results; what they have is not run",
    )
    parser.add_argument("--out", type=Path, help="results file, written after each configuration")
    parser.add_argument("--commit", help="to report, where there is no checkout")
    args = parser.parse_args(argv)
    if not 0 <= args.accept < args.rows:
        parser.error(f"--accept {args.accept}: wanted 0 to {args.rows - 1}, the drafts of a block")
    if min(args.cycles, args.chunks) < 1 or args.rows < 2:
        parser.error("--cycles and --chunks start at 1, --rows at 2")
    args.config += [Setting.parse(text) for text in MATRICES.get(args.matrix, ())]
    args.config = list(dict.fromkeys(args.config)) or [Setting.parse(_SMALL[0])]
    done = {name for path in args.skip for name in measured(path)}
    args.config = [setting for setting in args.config if str(setting) not in done]
    return args


def measured(path: Path) -> list[str]:
    """The configurations that a results file has figures of."""
    results = json.loads(path.read_text())["results"]
    keys = ("shapes", "drafter", "batch", "context")
    return [":".join(str(one[key]) for key in keys) for one in results if "error" not in one]


class Budget:
    """Minutes to spend; whatever is started is expected to take what the ones before it took."""

    def __init__(self, minutes: float) -> None:
        self.end = time.perf_counter() + 60 * minutes
        self.longest = 0.0

    def is_spent(self) -> bool:
        return self.end - time.perf_counter() < self.longest

    def took(self, since: float) -> None:
        self.longest = max(self.longest, time.perf_counter() - since)


def time_torch(args: argparse.Namespace) -> dict[Setting, dict[str, Any]]:
    """PyTorch's side of each configuration, before JAX takes the device's memory."""
    found: dict[Setting, dict[str, Any]] = {}
    budget = Budget(args.minutes * args.torch_share)
    for setting in args.config if args.torch else ():
        if setting.drafter not in _OF_TORCH:
            continue
        if budget.is_spent():
            found[setting] = {"not_run": "no time left"}
            continue
        say(f"{setting}: PyTorch")
        began = time.perf_counter()
        found[setting] = run_torch(setting, args)
        budget.took(began)
        write(args.out, {"torch": {str(key): value for key, value in found.items()}})
    return found


def measure(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Figures of one configuration, or why there are none: out of memory, most often."""
    try:
        return bench.measure(setting)
    except (RuntimeError, MemoryError) as error:  # XLA's errors among them
        bench.forget()
        return {**asdict(setting), "error": str(error).strip().split("\n")[0][:300]}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    began = time.perf_counter()
    of_torch = time_torch(args)
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout without installing
    # 32 sequences of 16k tokens at 8B shapes take 110 GB of an H200's 150.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    report: dict[str, Any] = {**facts(args), "results": [], "not_run": []}
    bench = Bench(args)
    budget = Budget(args.minutes - (time.perf_counter() - began) / 60)
    for setting in args.config:
        if budget.is_spent():
            report["not_run"].append(str(setting))
            continue
        say(f"{setting}: ours")
        start = time.perf_counter()
        result = measure(bench, setting)
        budget.took(start)
        theirs = of_torch.get(setting, {})
        if theirs:
            result["torch"] = theirs
        if "cycle_ms" in theirs and "cycle_ms" in result:
            result["torch_over_ours"] = round(theirs["cycle_ms"] / result["cycle_ms"], 3)
        report["results"].append(result)
        write(args.out, report)
        print(table(result), flush=True)
    write(args.out, report)
    print(json.dumps(report))
    return int(any("error" in result for result in report["results"]))


if __name__ == "__main__":
    sys.exit(main())
