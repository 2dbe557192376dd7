"""Everything that needs a GPU, in one go: is it right there, and what does a cycle cost.

    python scripts/gpu_check.py --out results
    python scripts/gpu_check.py law loop_small --out results --minutes 4

Sections (`gpu_sections.py`) run in processes of their own, so that one which takes the device down
or runs out of time costs nothing but itself: those that only check side by side, then those that
time, one after another. Records are written to `--out`
as they grow, and end up in one file, check.json. Ends with a table and, last, one JSON object; the
exit code is 1 if anything was found wrong. `--platform cpu --smoke` runs small forms of all of it
by the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_facts import write
from gpu_sections import ROOT, SECTIONS, SIDE_BY_SIDE

_STARTING_SECONDS = 15  # with less left than this a section could not even begin


def say(text: str) -> None:
    print(f"gpu_check: {text}", file=sys.stderr, flush=True)


def run_section(name: str, args: argparse.Namespace) -> int:
    """Run one section in this process and write its record."""
    from gpu_facts import facts

    known = {"section": name, **facts(args.commit)}
    save = lambda record: write(args.out, f"{name}.json", {**known, "unfinished": True, **record})
    if not args.smoke and known["backend"] != "gpu":
        record: dict[str, Any] = {"right": False, "failed": f"no GPU: jax has {known['backend']}"}
    else:
        try:
            record = SECTIONS[name](args, save)
        except Exception:
            record = {"right": False, "failed": traceback.format_exc()[-2000:]}
    write(args.out, f"{name}.json", {**known, **record})
    return 0


def start(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run one section in its own process and return its record, with what became of it."""
    command = [sys.executable, __file__, name, "--in-process", "--out", str(args.out)]
    command += ["--platform", args.platform, "--repeats", str(args.repeats)]
    command += ["--sanitizer-seconds", str(min(args.sanitizer_seconds, max(30, seconds / 2 - 5)))]
    command += ["--smoke"] * args.smoke + (["--commit", args.commit] if args.commit else [])
    began = time.perf_counter()
    path = args.out / f"{name}.json"
    path.unlink(missing_ok=True)
    ending = ""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        if code := process.wait(timeout=seconds):
            ending = f"exit code {code}"
    except subprocess.TimeoutExpired:
        ending = f"over {seconds:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)  # with what it started itself
        process.wait()
    record = json.loads(path.read_text()) if path.is_file() else {}
    path.unlink(missing_ok=True)  # check.json has it from here on
    if ending or record.pop("unfinished", False):
        late = ending.startswith("over")
        record |= {"right": None if late else False, "failed": ending or "it did not end"}
    return {**record, "seconds": round(time.perf_counter() - began, 1)}


def timed(name: str, args: argparse.Namespace, end: float) -> dict[str, Any]:
    """The record of a section that has until `end` of `time.perf_counter`."""
    left = end - time.perf_counter()
    if left < _STARTING_SECONDS:
        return {"right": None, "why": "no time left"}
    say(f"{name} ({left:.0f} s left)")
    return start(name, args, left)


def summary(name: str, record: dict[str, Any]) -> str:
    """One line of the table."""
    verdict = {True: "right", False: "WRONG", None: "not checked"}[record.get("right")]
    told = record.get("why") or str(record.get("failed", "")).strip().split("\n")[-1]
    forms = record.get("forms", {})
    if forms:
        told += "  ".join(f"{form} {one['cycle_ms']:.3f} ms" for form, one in forms.items())
    if "checked" in record:
        told += f"{record['checked']} cases"
        if record["without_kernel"]:
            told += f"; no kernel: {', '.join(record['without_kernel'])}"
    elif "tests" in record:
        told += ", ".join(f"{record[key]} {key}" for key in ("tests", "failures", "skipped"))
    elif "rows" in record and not told:
        told = f"{len(record['rows'])} runs"
    return f"{name:<12}{verdict:<13}{record.get('seconds', 0):>7.1f} s  {told}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("section", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--out", type=Path, help="folder for results; default: a temporary one")
    parser.add_argument("--platform", default="cuda", help="what jax is to run on")
    parser.add_argument("--smoke", action="store_true", help="small forms, to test this script")
    parser.add_argument("--minutes", type=float, default=9.0, help="to end within")
    parser.add_argument("--repeats", type=int, default=200, help="executions with equal bits")
    parser.add_argument("--sanitizer-seconds", type=float, default=100, help="for each tool")
    parser.add_argument("--commit", help="to report, where there is no checkout")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := set(args.section) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ["JAX_PLATFORMS"] = args.platform
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # many processes, one device
    sys.path.insert(0, str(ROOT))  # run from a checkout without installing
    if args.in_process:
        return run_section(args.section[0], args)
    temporary = None if args.out else tempfile.TemporaryDirectory()
    args.out = (args.out or Path(temporary.name if temporary else ".")).resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + 60 * args.minutes
    chosen = args.section or list(SECTIONS)
    checks = [name for name in chosen if name in SIDE_BY_SIDE]
    records: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(max(1, len(checks))) as pool:
        begun = {name: pool.submit(timed, name, args, end) for name in checks}
        for name, running in begun.items():
            records[name] = running.result()
            write(args.out, "check.json", records)
    for name in (name for name in chosen if name not in checks):
        records[name] = timed(name, args, end)
        write(args.out, "check.json", records)
    print("\n".join(summary(name, record) for name, record in records.items()))
    print(json.dumps({name: record.get("right") for name, record in records.items()}))
    if temporary:
        temporary.cleanup()
    return int(any(record.get("right") is False for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
