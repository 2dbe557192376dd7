"""The benchmark script end to end on a tiny pair, and how it adds up a profile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "bench_decode.py"


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(_SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_tiny_pair_accepts_what_is_forced_and_results_are_written(tmp_path):
    out = tmp_path / "results.json"
    sizes = ("--cycles", "2", "--chunks", "2", "--accept", "3", "--page-size", "16")
    done = run("--config", "tiny:dflash2:2:64", *sizes, "--parts", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads(out.read_text())
    (result,) = report["results"]
    assert result["accepted"] == 3
    assert min(result[f"{name}_ms"] for name in ("cycle", "propose", "verify", "commit")) > 0
    rate = 1000 * 2 * 4 / result["cycle_ms"]
    assert result["tokens_per_s"] == pytest.approx(rate, rel=1e-3)  # rounded to four decimals
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", ["qwen3-8b:dflash:1", "tiny:dspark:1:64", "tiny:dflash:0:64"])
def test_a_configuration_that_cannot_be_read_ends_with_code_two(text):
    done = run("--config", text)
    assert done.returncode == 2
    assert repr(text) in done.stderr


def test_kernels_are_added_up_over_gpu_streams_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(_SCRIPT.parent))
    from decode_stages import sum_kernels

    def named(kind, pid, name, tid=0):
        return {"name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}

    def ran(pid, tid, name, dur):
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "dur": dur, "ts": 0}

    events = [
        named("process", 1, "/device:GPU:0"),
        named("process", 2, "/host:CPU"),
        named("thread", 1, "Stream #14(Compute)", 7),
        named("thread", 1, "XLA Ops", 8),
        ran(1, 7, "loop_add_fusion_12", 2.0),
        ran(1, 7, "loop_add_fusion", 4.0),
        ran(1, 8, "loop_add_fusion", 100.0),
        ran(2, 7, "loop_add_fusion", 100.0),
    ]
    (row,) = sum_kernels(events, cycles=2, top=5)
    assert row == {
        "kernel": "loop_add_fusion",
        "us_a_cycle": 3.0,
        "calls_a_cycle": 1.0,
        "us_a_call": 3.0,
    }
