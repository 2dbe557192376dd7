"""Write `docs/benchmarks.md` from the results that the GPU scripts left in a folder.

    python scripts/write_benchmarks.py results --date 2026-12-01

Each results file is copied to `docs/benchmarks/` under its name, device and date, and becomes the
text between a pair of markers of the page: `<!-- kernels -->` ... `<!-- /kernels -->`. What the
folder has no results for stays as it is. `bench_decode` may have left several: `decode*.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Report = dict[str, Any]


def rows_of(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table; `head` is its first line's cells, divided by |."""
    count = head.count("|") + 1
    lines = [f"| {head} |", "|" + " --- |" * count]
    lines += ["| " + " | ".join("" if x is None else str(x) for x in row) + " |" for row in rows]
    return "\n".join(lines)


def read_with(report: Report) -> str:
    """The sentence that every table is read with."""
    versions = {"jax": report["jax"]} if isinstance(report.get("jax"), str) else report["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"{report['device']}, {named}, commit `{report['commit']}`."


def _us(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def kernels(report: Report) -> str:
    """Every op: kernel, jax-triton, XLA form and PyTorch in us, and the limit."""

    def cells(row: Report) -> list[Any]:
        share = row.get("share_of_limit")
        right = {True: "yes", False: "**no**", None: ""}[row.get("right")]
        times = [_us(row.get(f"{form}_us")) for form in ("pallas", "triton", "xla", "torch")]
        rest = [_us(row["limit_us"]), None if share is None else f"{share:.0%}"]
        rate = None if "tb_s" not in row else f"{row['tb_s']:.2f}"
        return [f"`{row['op']}`", row["shape"], *times, *rest, rate, _us(row["aim_us"]), right]

    head = "op | shape | kernel | jax-triton | XLA | PyTorch | limit | of it | TB/s | aim | right"
    text = [read_with(report), "", rows_of(head, map(cells, report["rows"]))]
    failed = [
        f"* `{row['op']}`, {row['shape']}: {key.split('_')[0]} failed: {row[key]}"
        for row in report["rows"]
        for key in row
        if key.endswith("_error") and isinstance(row[key], str)
    ]
    wrong = [one for one in report["oracle"] if one.get("right") is False]
    served = [one for one in report["oracle"] if "right" in one]
    text += ["", *failed] if failed else []
    older = sorted({row["commit"] for row in report["rows"] if "commit" in row})
    for commit in (one for one in older if one != report["commit"]):
        ops = sorted({f"`{row['op']}`" for row in report["rows"] if row.get("commit") == commit})
        text += ["", f"As of commit `{commit}`, unchanged since: {', '.join(ops)}."]
    text += ["", f"Against the oracle: {len(served) - len(wrong)} of {len(served)} cases right."]
    if report["not_run"]:
        text.append(f"Not run for want of time: {'; '.join(report['not_run'])}.")
    return "\n".join(text)


def cycle(report: Report) -> str:
    """`bench_decode`'s configurations beside PyTorch, and what DFlash2 adds."""

    def cells(one: Report) -> list[Any]:
        if "error" in one:
            return [one["shapes"], one["drafter"], one["batch"], one["context"], one["error"]]
        theirs = one.get("torch", {})
        ratio = one.get("torch_over_ours")
        parts = (one.get("propose_ms"), one.get("verify_ms"), one.get("commit_ms"))
        return [
            one["shapes"],
            one["drafter"],
            one["batch"],
            f"{one['context']:,}",
            f"{one['cycle_ms']:.2f} ({one['cycle_ms_min']:.2f} to {one['cycle_ms_max']:.2f})",
            " / ".join(f"{x:.2f}" for x in parts if x is not None),
            f"{one['limit_ms']:.2f}",
            f"{one['share_of_limit']:.0%}",
            f"{theirs['cycle_ms']:.2f}" if "cycle_ms" in theirs else theirs.get("error", ""),
            None if ratio is None else f"**{ratio:.2f}**",
        ]

    head = "shapes | drafter | batch | context | ms a cycle | propose / verify / commit"
    head += " | limit | of it | PyTorch | ratio"
    text = [read_with(report), "", rows_of(head, map(cells, report["results"]))]
    added = list(_added(report["results"]))
    if added:
        text += ["", "Convolution and selector, DFlash2 over DFlash: " + "; ".join(added) + "."]
    if report["not_run"]:
        text += ["", f"Not run for want of time: {', '.join(report['not_run'])}."]
    return "\n".join(text)


def _added(results: list[Report]) -> Iterable[str]:
    """What a DFlash2 cycle costs over a DFlash one of the same sizes, in per cent."""
    times = {
        (one["shapes"], one["batch"], one["context"], one["drafter"]): one["cycle_ms"]
        for one in results
        if "cycle_ms" in one
    }
    for (*sizes, drafter), ms in times.items():
        base = times.get((*sizes, "dflash"))
        if drafter == "dflash2" and base is not None:
            shapes, batch, context = sizes
            yield f"{shapes}, batch {batch}, {context:,} keys {100 * (ms / base - 1):+.1f} %"


_OTHER_FORMS = {
    "impl_pallas": 'With `impl="pallas"`, our matrix products in place of XLA\'s',
    "impl_xla": 'With `impl="xla"` and XLA\'s own form of the loop, where this started',
}


def loop(report: Report) -> str:
    """Forms of the loop, cycles a dispatch, repeated runs, and what is launches."""
    forms = report["forms"]
    text = [read_with(report) + f" Shapes of {report['shapes']}, DFlash2, batch 1, 1,024 keys.", ""]
    head = "form | ms a cycle, 8 a dispatch | compile s"
    text.append(
        rows_of(
            head,
            ((name, _with_range(x), f"{x['compile_s']:.1f}") for name, x in forms.items()),
        )
    )
    counts = [*report["cycles"], forms["while_graph"]]
    shown = sorted((one["cycles"], one["cycle_ms"]) for one in counts)
    text += ["", "Cycles a dispatch: " + ", ".join(f"{n}: {ms:.3f} ms" for n, ms in shown) + "."]
    for name, one in report["repeats"].items():
        text.append(f"`{name}`: {one['different']} of {one['executions']} executions differ.")
    launches = report.get("launches", {})
    if launches.get("kernels_a_cycle"):  # a profile has none where there is no GPU
        text.append(
            f"{launches['kernels_a_cycle']:.0f} kernels a cycle of {launches['cycle_ms']:.3f} ms; "
            f"profiled, their times add up to {launches['busy_ms']:.3f} ms."
        )
    for key, told in _OTHER_FORMS.items():
        if "cycle_ms" in (one := report.get(key, {})):
            text.append(f"{told}: {one['cycle_ms']:.3f} ms.")
    return "\n\n".join(part for part in text if part)


def _with_range(one: Report) -> str:
    return f"{one['cycle_ms']:.3f} ({one['low']:.3f} to {one['high']:.3f})"


def smollm2(report: Report) -> str:
    """Real prompts: tokens a second, plain and drafted."""

    def cells(one: Report) -> list[Any]:
        over = one.get("over_plain")
        law = {True: "equal", False: "**differs**", None: ""}[one.get("right")]
        rate = f"{one['tokens_per_s']:,.0f}"
        return [
            one["drafter"],
            one["batch"],
            f"{one['tau']:.2f}",
            rate,
            None if over is None else f"{over:.2f}",
            f"{one['cycle_ms']:.3f}",
            law,
        ]

    head = "drafter | batch | tau | tokens/s | over plain | ms a cycle | against plain, bit for bit"
    return "\n".join([read_with(report), "", rows_of(head, map(cells, report["rows"]))])


def check(report: Report) -> str:
    """One line a section of `gpu_check.py`."""
    verdict = {True: "right", False: "**wrong**", None: "not checked"}
    rows = [
        (name, verdict[one.get("right")], one.get("seconds"), one.get("why", ""))
        for name, one in report.items()
    ]
    first = next((one for one in report.values() if "device" in one), None)
    text = [read_with(first), ""] if first else []
    return "\n".join([*text, rows_of("section | verdict | seconds | ", rows)])


SECTIONS: dict[str, Callable[[Report], str]] = {
    "kernels": kernels,
    "decode": cycle,
    "loop_small": loop,
    "loop_large": loop,
    "smollm2": smollm2,
    "check": check,
}


def replaced(page: str, name: str, text: str) -> str:
    """The page with `text` between the markers of `name`; ValueError if it has none."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"write_benchmarks: the page has no pair of markers named {name!r}")
    return pattern.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page, count=1)


def merged(reports: list[Report]) -> Report:
    """Several results of `bench_decode` as one: the first has the facts, all have results."""
    keys = ("shapes", "drafter", "batch", "context")
    results = [one for report in reports for one in report["results"]]
    done = {":".join(str(one[key]) for key in keys) for one in results}
    missing = [name for name in reports[-1]["not_run"] if name not in done]
    return {**reports[0], "results": results, "not_run": missing}


def results_in(folder: Path) -> dict[str, Report]:
    """What the folder has for each section of the page; parts of a check are in its one file."""
    read = lambda pattern: [json.loads(p.read_text()) for p in sorted(folder.glob(pattern))]
    found: dict[str, Report] = {}
    for check in read("check.json"):
        found |= {name: one for name, one in check.items() if name in SECTIONS and "why" not in one}
        found["check"] = check
    if reports := read("kernels.json"):
        found["kernels"] = reports[0]
    if reports := read("decode*.json"):
        found["decode"] = merged(reports)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="folder that the scripts wrote to")
    parser.add_argument("--date", required=True, help="of the run, as in 2026-12-01")
    parser.add_argument("--device", default="h200", help="for the names of the copies")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    args = parser.parse_args(argv)
    page = args.docs / "benchmarks.md"
    text = page.read_text()
    written = []
    for name, report in results_in(args.results).items():
        section = SECTIONS[name]
        if "failed" in report:
            print(f"write_benchmarks: {name} failed, left out", file=sys.stderr)
            continue
        text = replaced(text, name, section(report))
        copy = args.docs / "benchmarks" / f"{name}-{args.device}-{args.date}.json"
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(json.dumps(report, indent=1) + "\n")
        written.append(name)
    page.write_text(text)
    print(json.dumps({"written": written}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
