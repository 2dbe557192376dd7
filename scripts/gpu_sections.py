"""The parts of `gpu_check.py`, each run in a process of its own: a function that returns a record.

A record has `right`, and whatever figures belong to it. Records are written as they grow. A section
whose cases compile for minutes is dealt out over processes, a share each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
Record = dict[str, Any]
Save = Callable[[Record], None]


def parity(args: argparse.Namespace, save: Save) -> Record:
    """Every kernel against its NumPy oracle, in f32 and bf16, at the shapes of the tests."""
    rows = _dealt("parity", _parity, 12, args, save)
    wrong = [row for row in rows if row.get("right") is False]
    served = [row for row in rows if "right" in row]
    return {
        "right": bool(served) and not wrong,
        "checked": len(served),
        "without_kernel": sorted({row["op"] for row in rows if "why" in row}),
        "wrong": wrong,
        "rows": rows,
    }


def _parity(args: argparse.Namespace, save: Save) -> list[Record]:
    from kernel_ops import OPS, check, in_both_dtypes

    rows: list[Record] = []
    for op in _share(OPS, args):
        for case in in_both_dtypes(op)[: 1 if args.smoke else None]:
            named = {"op": op.name, "case": case.name, "dtype": case.dtype}
            try:
                rows.append(check(op, case, "interpret" if args.smoke else "pallas"))
            except NotImplementedError as error:
                rows.append({**named, "why": str(error)[:200]})
            except Exception as error:
                failed = f"{type(error).__name__}: {error!s:.300}"
                rows.append({**named, "right": False, "failed": failed})
        save({"rows": rows})
    return rows


def law(args: argparse.Namespace, save: Save) -> Record:
    """Drafted tokens and logit hashes equal plain ones, bit for bit, and in a second run too."""
    rows = _dealt("law", _law, 5, args, save)
    return {"right": all(row["right"] for row in rows), "rows": rows}


def _law(args: argparse.Namespace, save: Save) -> list[Record]:
    from tests import kit

    settings = [
        ("qwen3", kind, batch, dtype)
        for batch in (4, 1, 32)
        for kind in ("dflash2", "dflash")
        for dtype in ("bfloat16", "float32")
        if dtype == "bfloat16" or batch == 4
    ]
    hybrids = [("qwen3_5", "dflash2", 4, "bfloat16"), ("qwen3_next", "dflash", 4, "float32")]
    settings[2:2] = [*hybrids, ("qwen3_5", "dflash2", 1, "bfloat16")]
    rows: list[Record] = []
    for family, kind, batch, dtype in _share(settings[: 1 if args.smoke else None], args):
        params = kit.pair(family, kind, dtype=dtype, block=16).params
        fixed = kit.sizes(params, batch, page_size=16, max_context=96)
        lengths = [1 + 7 * i % 31 for i in range(max(batch, 4))]  # of one, no draft may be right
        requests = [kit.Request(kit.prompt(n, seed=n), 24 + n % 9) for n in lengths]
        equal, tokens, accepted = True, 0, 0
        for first in range(0, len(requests), batch):
            some = requests[first : first + batch]
            plain = kit.plain(params, fixed, some)
            runs = [kit.run(params, fixed, some) for _ in range(2)]
            equal &= all((x.tokens, x.hashes) == (plain.tokens, plain.hashes) for x in runs)
            tokens += sum(map(len, plain.tokens))
            accepted += sum(map(sum, runs[0].accepted))
        rows.append(
            {
                "target": family,
                "drafter": kind,
                "batch": batch,
                "dtype": dtype,
                "tokens": tokens,
                "accepted": accepted,
                "right": equal and accepted > 0,
            }
        )
        save({"rows": rows})
    return rows


def _share(cases: Sequence[Any], args: argparse.Namespace) -> Sequence[Any]:
    """Every n-th of the cases, where this process has one of n shares."""
    first, step = args.share or (0, 1)
    return cases[first::step]


def _dealt(
    name: str, work: Callable[..., list[Record]], shares: int, args: argparse.Namespace, save: Save
) -> list[Record]:
    """The rows of all shares, from processes side by side, and one for each that failed."""
    if args.share or args.smoke:
        return work(args, save)
    with tempfile.TemporaryDirectory() as folder:
        begun = [_begin(name, i, shares, Path(folder) / str(i), args) for i in range(shares)]
        rows = []
        for i, process in enumerate(begun):
            code = process.wait()
            path = Path(folder) / str(i) / f"{name}.json"
            record = json.loads(path.read_text()) if path.is_file() else {}
            rows += record.get("rows", [])
            if code or not record or record.get("failed") or record.get("unfinished"):
                failed = record.get("failed", f"exit code {code}")
                rows.append({"op": f"share {i}", "right": False, "failed": failed})
            save({"rows": rows})  # kept if time runs out on the others
    return rows


def _begin(
    name: str, share: int, shares: int, out: Path, args: argparse.Namespace
) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), name, "--in-process"]
    command += ["--share", str(share), str(shares), "--out", str(out), "--platform", args.platform]
    return subprocess.Popen(command, cwd=ROOT)


def loop_small(args: argparse.Namespace, save: Save) -> Record:
    """Forms of the loop where a cycle is launches: SmolLM2's shapes."""
    return _loop(args, save, "tiny" if args.smoke else "smollm2-135m", rows=8)


def loop_large(args: argparse.Namespace, save: Save) -> Record:
    """Forms of the loop where a cycle is bytes: Qwen3-8B's shapes."""
    return _loop(args, save, "tiny" if args.smoke else "qwen3-8b", rows=16)


def _loop(args: argparse.Namespace, save: Save, shapes: str, rows: int) -> Record:
    from loop_forms import Bench, forms

    bench = Bench(shapes, 64 if args.smoke else 1024, rows=rows)
    found: Record = {"shapes": shapes, "forms": {}, "cycles": [], "repeats": {}}
    every = forms()
    if args.smoke:
        every = {name: every[name] for name in ("while_graph", "static_graph")}
    chunks = 2 if args.smoke else 20
    for name, decode in every.items():
        found["forms"][name] = bench.time(decode, 2 if args.smoke else 8, chunks)
        save(found)
    shipped = every["while_graph"]
    bits = {}
    for name in list(every)[:2]:
        found["repeats"][name] = bench.repeat(every[name], 2, 2 if args.smoke else args.repeats)
        bits[name] = found["repeats"][name].pop("bits")
        save(found)
    first, second = bits
    found["forms_agree"] = bits[first] == bits[second]
    for cycles in () if args.smoke else (1, 2, 4, 16):
        found["cycles"].append(bench.time(shipped, cycles, chunks))
        save(found)
    found["launches"] = bench.launches(found["forms"]["while_graph"]["cycle_ms"])
    found["impl_pallas"] = _other_form(args, shapes, rows, chunks, "pallas", "while_graph")
    found["impl_xla"] = _other_form(args, shapes, rows, chunks, "xla", "while_default")
    right = all(one["different"] == 0 for one in found["repeats"].values())
    return {"right": right, **found}


def _other_form(
    args: argparse.Namespace, shapes: str, rows: int, chunks: int, impl: str, form: str
) -> Record:
    """A form of the loop with every op by one implementation."""
    if args.smoke:
        return {"why": "needs a GPU"}
    from loop_forms import Bench, forms

    try:
        bench = Bench(shapes, 1024, rows=rows, impl=impl)
        return bench.time(forms()[form], 8, chunks)
    except Exception as error:  # an op without a kernel refuses
        return {"why": f"{type(error).__name__}: {error!s:.300}"}


def smollm2(args: argparse.Namespace, save: Save) -> Record:
    """SmolLM2 end to end on real prompts: tokens/s plain and drafted, and the law on them."""
    from dflash_jax.download import SMOLLM2, cache_folder

    if args.smoke or not (cache_folder() / SMOLLM2.file_name).is_file():
        return {"right": None, "why": f"{SMOLLM2.file_name} is not in {cache_folder()}"}
    import dflash_jax as dj
    from dflash_jax.drafters import no_drafter
    from dflash_jax.engine import summary
    from dflash_jax.train.data import chat_ids
    from dflash_jax.train.eval_sets import eval_prompts

    tokenizer = dj.load_tokenizer("smollm2")
    target = dj.turn_weights(dj.load_target("smollm2", dtype="bfloat16"))
    texts = [row["prompt"] for row in eval_prompts("humaneval")[:64]]
    prompts = [one for one in (chat_ids(tokenizer, text) for text in texts) if len(one) < 800]
    drafters = {
        "none": no_drafter(),
        **{
            kind: dj.turn_weights(dj.load_drafter(f"smollm2-{kind}", target))
            for kind in ("dflash", "dflash2", "dspark", "mtp")
        },
    }
    rows: list[Record] = []
    for batch, count in ((1, 4), (4, 8), (32, 32)):
        options = {"max_new_tokens": 128, "batch": batch, "max_context": 1024, "eos_ids": []}
        for name, draft in drafters.items():
            params = dj.Params(target=target, draft=draft)
            made = dj.generate(params, prompts[:count], certify=True, **options)
            row: Record = {"drafter": name, "batch": batch}
            if name != "none":
                plain = dj.generate(params, prompts[:count], certify=True, plain=True, **options)
                row["right"] = [(a.ids, a.hashes) for a in made] == [
                    (b.ids, b.hashes) for b in plain
                ]
            stats = summary(dj.generate(params, prompts[:count], **options))
            row |= {
                "tau": stats.tau,
                "tokens_per_s": stats.tokens_per_second,
                "cycle_ms": 1000 * stats.decode_seconds / max(1, _chunked_cycles(stats, batch)),
            }
            base = next((r for r in rows if r["batch"] == batch and r["drafter"] == "none"), None)
            if base is not None:
                row["over_plain"] = row["tokens_per_s"] / base["tokens_per_s"]
            rows.append(row)
            save({"rows": rows})
    return {"right": all(row.get("right", True) for row in rows), "rows": rows}


def _chunked_cycles(stats: Any, batch: int) -> int:
    """Cycles the device ran, about: of each batch as many as its longest sequence took."""
    counts = [len(one) for one in stats.committed]
    return sum(max(counts[i : i + batch]) for i in range(0, len(counts), batch))


def cache(args: argparse.Namespace, save: Save) -> Record:
    """A second process compiles nothing and gives the same bits; a third keeps XLA's choices."""
    from dflash_jax import executable_cache
    from scripts.make_tiny import write_tiny_pair

    with tempfile.TemporaryDirectory() as folder:
        at = write_tiny_pair(Path(folder) / "pair", drafter="dflash2", num_layers=2)
        kept = Path(folder) / "cache" / "executables"
        command = [sys.executable, "scripts/decode.py", "the end", "--check", "--json"]
        command += ["--target", str(at.target), "--drafter", str(at.drafter)]
        command += ["--max-new-tokens", "24", "--ignore-eos"]
        rows: list[Record] = []
        for name in ("cold", "warm", "choices_alone"):
            if name == "choices_alone":
                for path in kept.glob("*-cache"):
                    path.unlink()
            began = time.perf_counter()
            environment = {**os.environ, "DFLASH_CACHE": str(kept.parent), "PYTHONPATH": str(ROOT)}
            before = executable_cache.contents(kept)
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
            )
            if done.returncode:
                return {"right": False, "failed": done.stderr[-1000:], "rows": rows}
            said = json.loads(done.stdout.splitlines()[-1])
            now = executable_cache.contents(kept)
            rows.append(
                {
                    "start": name,
                    "seconds": time.perf_counter() - began,
                    "compiled": now.programs - before.programs,
                    "choices": now.choices,
                    "executable": said["certificate"]["executable"],
                    "ids": said["ids"],
                }
            )
            save({"rows": rows})
    cold, warm, third = rows
    same = [(row["executable"], row["ids"]) for row in rows]
    return {
        "right": warm["compiled"] == 0 and same[0] == same[1],
        "choices_alone_give_the_same": third["ids"] == cold["ids"],
        "rows": [{k: v for k, v in row.items() if k != "ids"} for row in rows],
    }


def marked(args: argparse.Namespace, save: Save) -> Record:
    """The tests that carry the mark `gpu`."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [f"--junitxml={results}", "tests/kernels" if args.smoke else "tests"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 5:  # pytest's code for no test
            return {"right": None, "why": "no test carries the mark"}
        suite = next(iter(_suites(results)), None)
        counts = {} if suite is None else {k: int(suite.get(k, 0)) for k in _COUNTS}
        return {"right": done.returncode == 0, **counts, "said": done.stdout[-2000:]}


_COUNTS = ("tests", "failures", "errors", "skipped")


def _suites(path: Path) -> Iterator[Any]:
    if path.is_file():
        yield from ElementTree.parse(path).getroot().iter("testsuite")


def sanitizer(args: argparse.Namespace, save: Save) -> Record:
    """Every kernel once under compute-sanitizer's memcheck and racecheck."""
    import shutil

    checker = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if args.smoke or not Path(checker).is_file():
        return {"right": None, "why": "compute-sanitizer is not here"}
    rows: list[Record] = []
    for tool, most in (("memcheck", "2"), ("racecheck", "1")):
        command = [checker, "--tool", tool, "--error-exitcode", "9", sys.executable]
        command += ["scripts/sanitize_kernels.py", "--cases", most]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=args.sanitizer_seconds
            )
            said = [line for line in done.stdout.splitlines() if line.startswith("=====")]
            row: Record = {"tool": tool, "right": done.returncode == 0, "summary": said[-3:]}
            if done.returncode:
                row |= {"report": said[:60], "stderr": done.stderr[-1000:]}
        except subprocess.TimeoutExpired:
            row = {"tool": tool, "right": None, "why": f"over {args.sanitizer_seconds} s"}
        rows.append({**row, "seconds": time.perf_counter() - began})
        save({"rows": rows})
    verdicts = [row["right"] for row in rows]
    return {"right": False if False in verdicts else all(verdicts) or None, "rows": rows}


# Sections that time nothing run side by side, then the others in turn, most important first: what
# does not fit the time is not run.
SIDE_BY_SIDE = ("parity", "law", "sanitizer", "cache")
SECTIONS: dict[str, Callable[[argparse.Namespace, Save], Record]] = {
    "parity": parity,
    "law": law,
    "sanitizer": sanitizer,
    "cache": cache,
    "loop_small": loop_small,
    "smollm2": smollm2,
    "tests": marked,
    "loop_large": loop_large,
}
