"""`scripts/bench_prefill.py` at a size that a CPU has time for."""

import json
from types import SimpleNamespace

import jax
import pytest

from dflash_jax.weight_layout import turn_weights
from scripts import bench_prefill
from scripts.random_pair import pair_configs, params_specs

SMALL = ("--shapes", "tiny-hybrid", "--drafter", "none", "--tokens", "32", "--dtype", "float32")


@pytest.mark.slow
def test_it_times_each_chunk_and_the_rule_and_ends_in_one_json_object(tmp_path, capsys):
    out = tmp_path / "prefill.json"
    argv = [*SMALL, "--chunks", "16,32", "--repeats", "2", "--out", str(out)]
    assert bench_prefill.main(argv) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert [row["chunk"] for row in report["prefill"]] == [16, 32]
    for row in (*report["prefill"], report["delta_rule"]):
        assert 0 < row["fastest"] <= row["seconds"] <= row["slowest"]
    row = report["prefill"][0]
    assert row["share_of_peak"] == pytest.approx(report["operations"] / row["seconds"] / 790e12)


def test_the_operations_of_the_rule_are_those_of_its_products():
    gdn = SimpleNamespace(key_dim=4, value_dim=6, num_value_heads=3)
    c, k, v = 64, 4, 6  # a chunk's two scores, solve, two reads, errors and write, 2 a multiply-add
    chunk = 2 * (2 * c * c * k + c * c * (k + v) / 2 + 2 * c * k * v + c * c * v + c * k * v)
    assert bench_prefill.rule_operations(gdn, 128) == 2 * 3 * chunk
    assert bench_prefill.rule_operations(None, 128) == 0


@pytest.mark.parametrize("drafter", ["dflash2", "mtp", "none"])
def test_turned_weights_do_as_many_operations(drafter):
    specs = params_specs(*pair_configs("tiny-hybrid", drafter))
    turned = jax.eval_shape(turn_weights, specs)
    assert bench_prefill.operations(turned, 32) == bench_prefill.operations(specs, 32)


def test_a_chunk_that_does_not_divide_the_prompt_is_refused(capsys):
    assert bench_prefill.main(["--tokens", "64", "--chunks", "48"]) == 2
    assert "--chunks 48, wanted powers of two that divide --tokens 64" in capsys.readouterr().err
