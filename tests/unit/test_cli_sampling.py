"""Sampling on the command line, over a tiny pair; the runs share their executables."""

import json

import pytest

from dflash_jax import cli, commands
from scripts.make_tiny import write_tiny_pair

DRAWN = ("--temperature", "0.8", "--top-p", "0.95", "--logprobs", "--frequency-penalty", "0.1")
SAMPLED = (*DRAWN, "--check", "--no-draft-sampling")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def dflash(tiny, capsys, monkeypatch):
    """Run `dflash decode` on the pair: code, the last line of stdout, and stderr."""
    monkeypatch.setattr(commands, "keep_executables", lambda: None)  # a setting of the process

    def run(*arguments, prompt=("in the",)):
        models = "--target", str(tiny.target), "--drafter", str(tiny.drafter)
        shape = "--max-new-tokens", "12", "--max-context", "64", "--json", "--no-stats"
        code = cli.main(["decode", *prompt, "--raw", *models, *shape, *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]) if code == 0 else None, err

    return run


def test_a_seed_gives_its_answer_again_and_a_new_one_is_in_the_record(dflash):
    code, first, _ = dflash(*SAMPLED, "--seed", "7")
    assert code == 0 and first["seed"] == 7 and first["sampling"]["temperature"] == 0.8
    assert len(first["logprobs"]) == len(first["ids"]) and max(first["logprobs"]) <= 0
    assert first["certificate"]["holds"] and first["certificate"]["num_tokens"] == 12
    assert not first["stats"]["settings"]["sampling"]["samples_drafts"]
    _, free, _ = dflash(*SAMPLED)
    assert free["seed"] not in (None, 7)
    _, again, _ = dflash(*SAMPLED, "--seed", str(free["seed"]))
    assert again["ids"] == free["ids"] != first["ids"]
    _, cut, _ = dflash(*SAMPLED, "--seed", "7", "--stop", first["text"][2:5])
    assert cut["text"] == first["text"][: first["text"].index(first["text"][2:5])]
    assert cut["ids"] == first["ids"][: len(cut["ids"])] and cut["finish_reason"] == "stop"
    assert len(cut["logprobs"]) == len(cut["ids"]) and cut["stop_string"] == first["text"][2:5]


def test_a_check_at_a_temperature_needs_drafts_that_are_not_drawn(dflash):
    code, _, err = dflash(*DRAWN, "--check")
    assert code == 2 and err.endswith("in distribution only; add --no-draft-sampling\n")


def test_every_line_of_a_file_is_sampled_as_it_says(dflash, tmp_path):
    """What a line does not say comes from the command line; one executable serves all."""
    lines = [
        {"temperature": 0},
        {"seed": 7},
        {"temperature": 1.5, "top_p": 0.5, "seed": 2**60, "logprobs": False},
        {"max_new_tokens": 4, "id": "short"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "in the", **line}) for line in lines))
    code, record, _ = dflash(*SAMPLED, "--seed", "11", prompt=("--prompts", str(path)))
    assert code == 0 and record["certificate"]["holds"] and record["sampling"] is None
    best, seven, hot, short = record["answers"]
    asked = [
        {n: one["sampling"][n] for n in ("temperature", "top_p", "seed")} for one in (best, hot)
    ]
    assert asked == [
        {"temperature": 0, "top_p": None, "seed": None},
        {"temperature": 1.5, "top_p": 0.5, "seed": 2**60},
    ]
    assert best["sampling"]["frequency_penalty"] == 0.1 and "seed" not in best
    assert "logprobs" in best and "logprobs" not in hot and hot["seed"] == 2**60
    _, alone, _ = dflash(*SAMPLED, "--seed", "7")
    assert seven["ids"] == alone["ids"] and seven["seed"] == 7
    flags = "--temperature", "1.5", "--top-p", "0.5", "--seed", str(2**60)
    _, alone, _ = dflash(*SAMPLED, *flags)
    assert hot["ids"] == alone["ids"] != seven["ids"]
    _, alone, _ = dflash(*SAMPLED, "--seed", "11")
    assert short["ids"] == alone["ids"][:4] and short["id"] == "short"
    assert best["ids"] not in (seven["ids"], hot["ids"])


def test_what_a_line_asks_of_the_models_is_refused_by_its_number(dflash, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": "x", "logit_bias": {"9999": 1}}')
    code, _, err = dflash(prompt=("--prompts", str(path)))
    assert code == 2 and "prompts.jsonl, line 2: logit_bias has token id 9999, outside" in err
    path.write_text('{"prompt": "x"}\n{"prompt": "x", "temperature": 1}')
    code, _, err = dflash("--check", "--draft-sampling", prompt=("--prompts", str(path)))
    assert code == 2 and "in distribution only; add --no-draft-sampling" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--top-p", "0.9"], "top_p is 0.9, but temperature 0.0 always takes the best token"),
        (["--seed", "1"], "seed is 1, but temperature 0.0 always takes the best token"),
        (["--temperature", "1", "--top-p", "2"], "top_p is 2.0, wanted above 0, up to 1"),
        (["--temperature", "1", "--top-k", "0"], "top_k is 0, wanted at least 1"),
        (["--temperature", "-1"], "temperature is -1.0, wanted 0 to 10000"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0, wanted 0.01 to 100"),
        (["--logit-bias", "1:2", "--logit-bias", "1:3"], "--logit-bias is given twice for token 1"),
        (["--logit-bias", "1"], "'1' is not ID:X, an id and a number"),
        (["--logit-bias", "9999:1"], "logit_bias has token id 9999, outside the vocabulary"),
        (["--stop", ""], "stop has an empty text"),
        (["--draft-sampling"], "draft_sampling is True, but no temperature is above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_sentence_and_code_2(dflash, arguments, words):
    code, _, err = dflash(*arguments)
    assert code == 2 and words in err.splitlines()[-1]
