"""`scripts/bench_chain.py` at a size that a CPU has time for."""

import json

import pytest

from scripts import bench_chain

SMALL = ("--vocab", "307", "--width", "16", "--rank", "8", "--drafts", "3", "--chains", "2",
         "--repeats", "2")  # fmt: skip


@pytest.mark.parametrize("changes", [["--kind", "rnn"], ["--top-k", "4", "--batch", "2"]], ids=str)
def test_it_ends_in_one_json_object_with_the_limit(changes, tmp_path, capsys):
    out = tmp_path / "chain.json"
    assert bench_chain.main([*SMALL, *changes, "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["limit_us"] == pytest.approx(3 * 2 * 307 * 8 / 4.3e6)
    assert 0 < report["fastest_us"] <= report["chain_us"] <= report["slowest_us"]


def test_a_wrong_argument_ends_with_code_two(capsys):
    assert bench_chain.main(["--rank", "0"]) == 2
    assert "--rank: '0', wanted a whole number from 1 on" in capsys.readouterr().err
