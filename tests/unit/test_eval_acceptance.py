"""`scripts/eval_acceptance.py` on tiny pairs, and what it refuses."""

import json

import numpy as np
import pytest

from dflash_jax.safetensors_io import read_file, write_file
from scripts import eval_acceptance
from scripts.make_tiny import write_tiny_pair

SIZES = ("--limit", "2", "--batch", "2", "--max-new-tokens", "48", "--page-size", "64",
         "--dtype", "float32")  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target whose logits are all equal, so that it says token 0 for ever, and a drafter."""
    folder = tmp_path_factory.mktemp("pair")
    made = write_tiny_pair(folder, target="llama", drafter="dflash", num_layers=2)
    path = made.target / "model.safetensors"
    tensors = {name: np.array(x) for name, x in read_file(path).items()}
    tensors["lm_head.weight"] = np.zeros_like(tensors["lm_head.weight"])
    write_file(path, tensors)
    return made


@pytest.mark.slow
def test_the_acceptance_of_a_text_that_repeats_itself(tmp_path, pair, capsys):
    out = tmp_path / "acceptance.jsonl"
    command = ["--target", str(pair.target), "--sets", "mt_bench", "--check-text", *SIZES]
    drafters = ["--drafters", f"none,ours={pair.drafter}"]
    assert eval_acceptance.main([*command, *drafters, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    report = json.loads(text.splitlines()[-1])
    assert [json.loads(line) for line in out.read_text().splitlines()] == report["records"]
    plain, ours = report["records"]
    assert (plain["drafter"], ours["drafter"]) == ("none", "ours")
    for record in (plain, ours):
        assert record["set"] == "mt_bench" and record["equal_answers"] == 1.0
        assert record["prompts"] == 2 and record["tokens"] == 96
    # The first token of an answer comes from its prefill, and ours says 0 as well.
    assert report["tau"] == {"none/mt_bench": 1.0, "ours/mt_bench": pytest.approx(47 / 6, abs=1e-4)}
    assert report["dtype"] == "float32" and report["max_new_tokens"] == 48
    assert report["draft_sampling"] is None is report["seed"]
    assert "tokens a cycle" in text


@pytest.fixture
def refused(monkeypatch, capsys, pair):
    """Run with some arguments changed; (exit code, the one line on stderr)."""
    from dflash_jax import weights

    def no_load(*args, **how):
        raise AssertionError("weights were loaded before the arguments were checked")

    monkeypatch.setattr(weights, "load_target", no_load)

    def attempt(*changes: str) -> tuple[int, str]:
        base = ["--target", str(pair.target), "--drafters", "none", *SIZES]
        code = eval_acceptance.main([*base, *changes])
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1, err
        assert err.startswith("eval_acceptance.py: ")
        return code, err

    return attempt


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--drafters", "dflash3"], "'dflash3' is no folder, wanted one, or one of none, prompt"),
        (["--drafters", "none,none"], "none, none, wanted each name once"),
        (["--drafters", ""], "'' is no folder"),
        (["--sets", "gsm8k,math500"], "wanted one or more of gsm8k, humaneval, mt_bench"),
        (["--sets", ""], "wanted one or more of"),
        (["--temperatures", "0,-1"], "--temperatures: '-1', wanted a number from 0 on"),
        (["--temperatures", "1,1"], "wanted each temperature once"),
        (["--limit", "-1"], "--limit: '-1', wanted a whole number from 0 on"),
        (["--batch", "0"], "--batch: '0', wanted a whole number from 1 on"),
        (["--page-size", "24"], "--page-size 24, wanted a power of two"),
        (["--max-context", "48"], "--max-new-tokens 48, wanted less than --max-context 48"),
        (["--max-context", "64"], "no prompt of gsm8k leaves room for 48 tokens"),
        (["--check-text"], "wanted two in --drafters and 0 in --temperatures"),
        (["--draft-sampling"], "a temperature above 0, but came none"),
        (["--drafters", "dflash", "--no-draft-sampling"], "above 0, but came 0 alone"),
        (["--out", "nowhere/x.jsonl"], "--out nowhere/x.jsonl: no folder nowhere"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_wrong_command_ends_with_code_two(refused, changes, says):
    code, err = refused(*changes)
    assert code == 2 and says in err, err


def test_a_drafter_of_another_target_ends_with_code_one(refused):
    code, err = refused("--drafters", "dflash2")
    assert code == 1 and "dflash2: hidden_size is 576 for the drafter and 64 for the target" in err


def test_a_target_that_is_not_there_ends_with_code_one(refused, tmp_path):
    code, err = refused("--target", str(tmp_path / "nothing"))
    assert code == 1 and "no such folder or file" in err


def test_help_shows_defaults(capsys):
    assert eval_acceptance.main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("default: smollm2", "default: gsm8k,humaneval,mt_bench", "(default: 32)"):
        assert words in text, words
