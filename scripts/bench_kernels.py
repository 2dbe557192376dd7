"""Time every kernel beside its XLA form and PyTorch, and check it in the same run.

Each op runs at the shapes it is meant for, on inputs that are not in the L2 (`kernel_timing.py`
says how); its result is compared with the XLA form's there, and with the NumPy oracle at the small
shapes of the tests. The limit is the fewest bytes a call can move over 4.37 TB/s, the most that any
GEMM reached on an H200. Figures are written to `--out` after each shape; the last line is one JSON
object. `--resume` goes on after what is written there; a kernel that takes the device down costs
its own figures alone, since the script then starts itself anew in that way.

    python scripts/bench_kernels.py --out results
    python scripts/bench_kernels.py top16 skinny_matmul --minutes 3 --out results --resume

`--smoke` runs small shapes once, by the interpreter on a CPU, to test this script.
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BYTES_A_US = 4.37e6


def say(text: str) -> None:
    print(f"bench_kernels: {text}", file=sys.stderr, flush=True)


def measure(one: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one op at one shape; what a form raised stands in place of its time."""
    import jax
    from kernel_timing import sets_needed

    limit = one.nbytes / BYTES_A_US
    row: dict[str, Any] = {
        "op": one.op,
        "shape": one.shape,
        "limit_us": limit,
        "aim_us": one.aim_us,
    }
    keys = jax.random.split(jax.random.key(0), sets_needed(one.nbytes, args.smoke))
    sets = [one.make(key) for key in keys]
    row["rotated_mb"] = len(sets) * one.nbytes / 1e6
    jax.block_until_ready(sets)
    results = {}
    for impl in one.impls:
        run = "interpret" if args.smoke and impl == "pallas" else impl
        try:
            results[impl] = check_run(one, run, sets[0])
            row |= _named(impl, _time(one, run, sets, args))
        except NotImplementedError as error:
            row[f"{impl}_why"] = str(error)[:300]
        except Exception as error:  # a form that fails is reported, and the others still run
            row[f"{impl}_error"] = f"{type(error).__name__}: {error!s:.300}"
    del sets
    if {"pallas", "xla"} <= results.keys():
        row |= compare(results["pallas"], results["xla"], one.exact)
    if "triton" in results and "xla" in results:
        row["triton_error_to_xla"] = compare(results["triton"], results["xla"], False)["error"]
    row |= _of_torch(one, args)
    if "pallas_us" in row:
        row["share_of_limit"] = limit / row["pallas_us"]
        row["tb_s"] = one.nbytes / row["pallas_us"] / 1e6
    return {k: round(v, 4) if isinstance(v, float) and v > 1e-3 else v for k, v in row.items()}


def check_run(one: Any, impl: str, inputs: Any) -> list[Any]:
    """The outputs of one call, on the host."""
    import jax
    import numpy as np

    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(one.call(impl))(*inputs))]


def _time(one: Any, impl: str, sets: Any, args: argparse.Namespace) -> Any:
    from kernel_timing import time_jax

    expected = one.xla_us if impl == "xla" else max(1.3 * one.nbytes / BYTES_A_US, 2.0)
    return time_jax(
        one.call(impl),
        sets,
        expected_us=1e6 if args.smoke else expected,
        samples=args.samples,
        carried=one.carried,
        **({"least_calls": 2} if args.smoke else {}),
    )


def _named(form: str, timing: Any) -> dict[str, Any]:
    low, high = (round(x, 3) for x in (timing.low, timing.high))
    return {f"{form}_us": timing.us, f"{form}_range": [low, high]}


def compare(got: list[Any], want: list[Any], exact: bool) -> dict[str, Any]:
    """How far the kernel is from the XLA form on the inputs that were timed."""
    import numpy as np

    if exact:
        wrong = sum(int((a != b).sum()) for a, b in zip(got, want, strict=True))
        return {"error": float(wrong), "right": wrong == 0}
    error = 0.0
    for a, b in zip(got, want, strict=True):
        if a.dtype.kind in "iu":  # ids that a near tie decides: how many differ
            error = max(error, float((a != b).mean()))
            continue
        a, b = a.astype(np.float32), b.astype(np.float32)
        scale = float(np.abs(b).max()) or 1.0
        error = max(error, float(np.abs(a - b).max()) / scale)
    return {"error": error, "right": bool(error <= 2.0**-6)}  # two roundings to bf16; not for NaN


def _of_torch(one: Any, args: argparse.Namespace) -> dict[str, Any]:
    """PyTorch's time, where it has the op and there is a PyTorch with a GPU."""
    if one.torch is None or args.smoke or importlib.util.find_spec("torch") is None:
        return {}
    from kernel_timing import sets_needed, time_torch

    try:
        import torch

        with torch.no_grad():
            call, make = one.torch()
            sets = [make() for _ in range(sets_needed(one.nbytes, False))]
            timing = time_torch(call, sets, samples=args.samples)
            del sets
            torch.cuda.empty_cache()
    except Exception as error:
        return {"torch_error": f"{type(error).__name__}: {error!s:.300}"}
    return {} if timing is None else _named("torch", timing)


def oracles(names: list[str], impl: str, most: int | None) -> list[dict[str, Any]]:
    """Every op against its NumPy oracle at the shapes of the tests."""
    from kernel_ops import OPS, check

    found = []
    for op in (op for op in OPS if op.name in names):
        for case in op.cases[:most]:
            try:
                found.append(check(op, case, impl))
            except NotImplementedError as error:
                found.append({"op": op.name, "case": case.name, "why": str(error)[:300]})
            except Exception as error:
                failed = f"{type(error).__name__}: {error!s:.300}"
                found.append({"op": op.name, "case": case.name, "right": False, "failed": failed})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as text."""
    head = f"{'op':<21}{'shape':<36}" + "".join(
        f"{name:>9}" for name in ("kernel", "triton", "xla", "torch", "limit", "aim")
    )
    lines = [head]
    for row in rows:
        cells = [row.get(f"{form}_us") for form in ("pallas", "triton", "xla", "torch", "limit")]
        cells.append(row["aim_us"])
        shown = "".join(f"{'' if x is None else f'{x:.1f}':>9}" for x in cells)
        right = {True: "", False: "  WRONG", None: "  not checked"}[row.get("right")]
        lines.append(f"{row['op']:<21}{row['shape']:<36}{shown}{right}")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("op", nargs="*", help="ops to time; all of them if none is named")
    parser.add_argument("--samples", type=int, default=12, help="of each time; the median counts")
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing after these")
    parser.add_argument("--out", type=Path, help="folder for kernels.json, written as it goes")
    parser.add_argument("--resume", action="store_true", help="skip what --out has already")
    parser.add_argument("--commit", help="to report, where there is no checkout")
    parser.add_argument("--smoke", action="store_true", help="small shapes, one sample, any device")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    began = time.perf_counter()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout without installing
    if not args.smoke:  # PyTorch is in the same process and wants some of the memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    import kernel_measures
    from gpu_facts import facts, write

    chosen = kernel_measures.smoke() if args.smoke else kernel_measures.full()
    names = sorted({one.op for one in chosen})
    unknown = set(args.op) - set(names)
    if unknown:
        say(f"no op {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return 2
    names = args.op or names
    if args.smoke:
        args.samples = 1
    report: dict[str, Any] = {**facts(args.commit), "rows": [], "not_run": [], "oracle": []}
    report["rows"] = earlier(args)
    done = {(row["op"], row["shape"]) for row in report["rows"]}
    left = lambda: 60 * args.minutes - (time.perf_counter() - began)
    for one in (one for one in chosen if one.op in names and (one.op, one.shape) not in done):
        if left() < 0:
            report["not_run"].append(f"{one.op} {one.shape}")
            continue
        say(f"{one.op} {one.shape}")
        report["rows"].append({**measure(one, args), "commit": report["commit"]})
        write(args.out, "kernels.json", report)
        if args.out and is_device_lost(report["rows"][-1]):
            say("the device is lost to this process; going on in a new one")
            start_anew(sys.argv[1:] if argv is None else argv, left() / 60)
    if left() > 0:
        report["oracle"] = oracles(names, "interpret" if args.smoke else "pallas", _most(args))
    write(args.out, "kernels.json", report)
    print(table(report["rows"]))
    print(json.dumps(report))
    wrong = [x for x in (*report["rows"], *report["oracle"]) if x.get("right") is False]
    return int(bool(wrong) or any("pallas_error" in row for row in report["rows"]))


def earlier(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows that an earlier call left in the results folder."""
    path = (args.out or Path()) / "kernels.json"
    return json.loads(path.read_text())["rows"] if args.resume and path.is_file() else []


def is_device_lost(row: dict[str, Any]) -> bool:
    """Whether a form ended in an error after which CUDA runs nothing more in this process."""
    failed = [value for key, value in row.items() if key.endswith("_error")]
    return any("CUDA_ERROR" in str(text) or "illegal" in str(text) for text in failed)


def start_anew(argv: list[str], minutes: float) -> None:
    """Replace this process by one that resumes."""
    again = [sys.executable, __file__, *argv, "--resume", "--minutes", str(max(minutes, 0.0))]
    os.execv(sys.executable, again)


def _most(args: argparse.Namespace) -> int | None:
    return 1 if args.smoke else None


if __name__ == "__main__":
    sys.exit(main())
