"""The benchmark script end to end on a tiny pair, and how it adds up a profile."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import loop
from dflash_jax.drafters import oracle_drafter
from dflash_jax.fixed import plan
from dflash_jax.options import DecodeOptions
from dflash_jax.scratch import init_scratch, scratch_specs
from dflash_jax.state import init_buffers, init_state
from scripts.random_pair import pair_configs, params_specs, weight_bytes

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


@pytest.mark.parametrize(("drafter", "drafts"), [("dspark", 7), ("mtp", 3)])
def test_a_chained_drafter_runs_inside_of_an_oracle(drafter, drafts):
    """As the benchmark does it: the oracle's drafts, the scratch and the carriers of the other."""
    target, draft = pair_configs("tiny", drafter)
    fixed = plan(target, draft, max_context=64, page_size=16, prefill_chunk=16)
    bare = params_specs(target, draft)
    tokens = jnp.zeros((1, 64), jnp.int32)
    forced = oracle_drafter(tokens, num_drafts=fixed.num_drafts, poison_at=2, inner=bare.draft)
    own = plan(target, forced.config, max_context=64, page_size=16, prefill_chunk=16)
    assert own == fixed
    assert fixed.num_drafts == drafts
    assert scratch_specs(forced.config, fixed) == scratch_specs(draft, fixed)
    carried = jax.eval_shape(
        lambda: (init_state(fixed), init_buffers(fixed), init_scratch(forced.config, fixed=fixed))
    )
    options = DecodeOptions(impl="xla")
    params = bare.replace(draft=forced)
    *_, scratch = loop.step.eval_shape(params, *carried, fixed=fixed, options=options)
    assert scratch.norm_buf.shape == (drafts, 128)


def test_the_bytes_of_a_cycle_count_what_is_read_for_each_draft():
    def total(drafter):
        return weight_bytes(params_specs(*pair_configs("tiny", drafter)))

    head = 2 * 4096 * 128  # the target's, in bf16
    assert total("dspark") - total("dflash") == 7 * 2 * 4096 * 256
    assert 4 * head < total("mtp") - total("none") + head < 6 * head


@pytest.mark.parametrize("text", ["qwen3-8b:dflash:1", "tiny:eagle:1:64", "tiny:dflash:0:64"])
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
