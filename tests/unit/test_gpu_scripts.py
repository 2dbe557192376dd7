"""The scripts that need a GPU, in small forms on a CPU: what they write and say of faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPTS = _ROOT / "scripts"


def run(script, *arguments):
    command = [sys.executable, str(_SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(_SCRIPTS))


@pytest.mark.slow
def test_kernels_are_timed_checked_and_written_and_a_second_call_resumes(tmp_path):
    done = run("bench_kernels.py", "skinny_matmul", "selector_walk", "--smoke", "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "kernels.json").read_text())
    rows = {row["op"]: row for row in report["rows"]}
    assert set(rows) == {"skinny_matmul", "selector_walk"}
    for row in rows.values():
        assert row["right"] and row["pallas_us"] > 0 and row["xla_us"] > 0 and row["limit_us"] > 0
    assert "needs jax-triton" in rows["skinny_matmul"]["triton_why"]
    assert all(one["right"] for one in report["oracle"]) and len(report["oracle"]) == 2
    again = run("bench_kernels.py", "skinny_matmul", "--smoke", "--out", tmp_path, "--resume")
    assert again.returncode == 0 and "bench_kernels: skinny" not in again.stderr
    written = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert written == report["rows"]


@pytest.mark.slow
def test_sections_of_the_check_run_in_processes_of_their_own(tmp_path):
    arguments = ("law", "smollm2", "--platform", "cpu", "--smoke", "--out", tmp_path)
    done = run("gpu_check.py", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = json.loads(done.stdout.splitlines()[-1])
    assert verdicts == {"law": True, "smollm2": None}
    (only,) = tmp_path.iterdir()
    records = json.loads(only.read_text())
    assert records["law"]["rows"][0]["accepted"] > 0 and records["law"]["backend"] == "cpu"
    assert records["smollm2"]["why"]


def test_a_check_without_a_gpu_is_wrong_and_says_so(tmp_path):
    done = run("gpu_check.py", "law", "--platform", "cpu", "--out", tmp_path)
    assert done.returncode == 1
    assert "no GPU: jax has cpu" in done.stdout


@pytest.mark.parametrize("script", ["gpu_check.py", "bench_kernels.py", "sanitize_kernels.py"])
def test_an_unknown_name_ends_with_code_two(script):
    done = run(script, "no_such_name")
    assert done.returncode == 2 and "no_such_name" in done.stderr


def test_a_section_that_dies_costs_itself_alone(scripts, tmp_path, monkeypatch):
    import gpu_check

    args = gpu_check.parse(["law", "--out", str(tmp_path), "--platform", "cpu"])
    dies = "import sys; sys.exit(134)"
    real = subprocess.Popen
    monkeypatch.setattr(
        gpu_check.subprocess, "Popen", lambda *_, **how: real([sys.executable, "-c", dies], **how)
    )
    record = gpu_check.start("law", args, 60)
    assert record["right"] is False and record["failed"] == "exit code 134"
    assert "WRONG" in gpu_check.summary("law", record)


def test_a_share_that_dies_is_a_wrong_row_and_the_others_keep_theirs(
    scripts, tmp_path, monkeypatch
):
    import gpu_check
    import gpu_sections

    def begin(name, share, shares, out, args):
        out.mkdir()
        (out / f"{name}.json").write_text(json.dumps({"rows": [{"op": share, "right": True}]}))
        return subprocess.Popen([sys.executable, "-c", f"import sys; sys.exit({7 * share})"])

    monkeypatch.setattr(gpu_sections, "_begin", begin)
    args = gpu_check.parse(["law", "--out", str(tmp_path)])
    kept = []
    save = lambda record: kept.append(len(record["rows"]))
    rows = gpu_sections._dealt("law", lambda *_: [], 2, args, save)
    assert kept == [1, 3]  # as they end, not when all have
    assert [row["right"] for row in rows] == [True, True, False]
    assert rows[2]["failed"] == "exit code 7"


def test_configurations_that_results_have_are_skipped(scripts, tmp_path):
    import bench_decode

    path = tmp_path / "decode.json"
    one = {"shapes": "tiny", "drafter": "dflash", "batch": 1, "context": 64, "cycle_ms": 1.0}
    failed = {**one, "batch": 2, "error": "out of memory"}
    path.write_text(json.dumps({"results": [one, failed]}))
    asked = ["tiny:dflash:1:64", "tiny:dflash:2:64", "tiny:dflash:4:64"]
    argv = [word for name in asked for word in ("--config", name)]
    args = bench_decode.parse([*argv, "--skip", str(path)])
    assert [str(setting) for setting in args.config] == asked[1:]
    full = bench_decode.MATRICES["full"]
    assert len(full) == len(set(full)) == 37 and full[0] == "qwen3-8b:dflash:1:1024"


ROW = {
    "op": "top16",
    "shape": "16 x 5",
    "limit_us": 2.0,
    "aim_us": 15.0,
    "pallas_us": 12.5,
    "xla_us": 348.0,
    "share_of_limit": 0.16,
    "tb_s": 0.7,
    "right": True,
}
SMOLLM2 = {
    "drafter": "dflash2",
    "batch": 32,
    "tau": 3.9,
    "tokens_per_s": 20000.0,
    "over_plain": 1.6,
    "cycle_ms": 2.1,
    "right": True,
}
FACTS = {"device": "NVIDIA H200", "versions": {"jax": "0.11.2", "torch": None}, "commit": "abc"}


def test_pages_are_written_between_their_markers_and_nowhere_else(scripts, tmp_path):
    import write_benchmarks

    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir(), docs.mkdir()
    page = (_ROOT / "docs" / "benchmarks.md").read_text()
    (docs / "benchmarks.md").write_text(page)
    report = {**FACTS, "rows": [ROW], "oracle": [{"right": True}], "not_run": ["walk B=1"]}
    (results / "kernels.json").write_text(json.dumps(report))
    real = {"rows": [SMOLLM2], "right": True, "seconds": 50.0}
    check = {"law": {**FACTS, "right": True, "seconds": 9.5}, "smollm2": {**FACTS, **real}}
    check["loop_small"] = {"right": None, "why": "no time left"}
    (results / "check.json").write_text(json.dumps(check))
    config = {"shapes": "tiny", "drafter": "dflash", "batch": 1, "context": 1024}
    times = {"cycle_ms": 5.0, "cycle_ms_min": 4.9, "cycle_ms_max": 5.1}
    one = {**config, **times, "limit_ms": 4.0, "share_of_limit": 0.8, "torch_over_ours": 1.4}
    second = {**one, "drafter": "dflash2", "cycle_ms": 5.05}
    for name, result in (("decode", one), ("decode-2", second)):
        left = {**FACTS, "results": [result], "not_run": ["tiny:dflash2:1:1024", "tiny:none:1:64"]}
        (results / f"{name}.json").write_text(json.dumps(left))
    for _ in range(2):  # a second time changes nothing
        argv = [str(results), "--date", "2026-12-01", "--docs", str(docs)]
        assert write_benchmarks.main(argv) == 0
        text = (docs / "benchmarks.md").read_text()
        assert "| `top16` | 16 x 5 | 12.5 |  | 348 |  | 2.0 | 16% | 0.70 | 15.0 | yes |" in text
        assert "Not run for want of time: walk B=1." in text
        assert "| law | right | 9.5 |  |" in text
        assert "| loop_small | not checked |  | no time left |" in text
        assert "| dflash2 | 32 | 3.90 | 20,000 | 1.60 | 2.100 | equal |" in text
        assert "DFlash2 over DFlash: tiny, batch 1, 1,024 keys +1.0 %." in text
        assert "want of time: tiny:none:1:64." in text and text.count("# Before the kernels") == 1
    assert text.split("# Before the kernels")[1] == page.split("# Before the kernels")[1]
    copies = sorted(path.name for path in (docs / "benchmarks").iterdir())
    written = ("check", "decode", "kernels", "smollm2")
    assert copies == [f"{name}-h200-2026-12-01.json" for name in written]


def test_every_section_of_the_page_has_its_markers(scripts):
    import write_benchmarks

    page = (_ROOT / "docs" / "benchmarks.md").read_text()
    for name in write_benchmarks.SECTIONS:
        assert write_benchmarks.replaced(page, name, "text").count("text\n<!--") == 1
    with pytest.raises(ValueError, match="no pair of markers named 'nothing'"):
        write_benchmarks.replaced(page, "nothing", "text")
