"""The real thing: the default model answers in English, and drafting changes nothing of it."""

import json

import jax
import pytest

from dflash_jax import cli, commands
from dflash_jax.download import DownloadError, default_model
from dflash_jax.packaged import our_drafters

pytestmark = pytest.mark.slow
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Count from one to ten.",
)


@pytest.fixture(scope="module", autouse=True)
def compile_effort():
    """As for a user: these programs run for longer than they take to compile."""
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def model():
    try:
        return default_model(progress=False)
    except DownloadError as error:
        pytest.skip(str(error))


OURS = our_drafters("smollm2")
DRAFTERS = ("prompt_lookup", *OURS)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_it_answers_in_english_and_the_certificate_holds(capsys, monkeypatch, tmp_path, drafter):
    monkeypatch.setattr(commands, "keep_executables", lambda: None)  # a setting of the process
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    arguments = ["--prompts", str(path), "--drafter", drafter, "--batch", "2", "--check"]
    assert cli.main(["decode", *arguments, "--max-new-tokens", "24"]) == 0
    *answers, last = map(json.loads, capsys.readouterr().out.splitlines())
    by_index = sorted(answers, key=lambda one: one["index"])
    assert "The capital of France is Paris" in by_index[0]["text"]
    assert "def " in by_index[1]["text"]
    assert last["certificate"]["holds"]
    assert last["certificate"]["num_tokens"] == sum(len(one["ids"]) for one in answers)
    if drafter in OURS:
        assert last["stats"]["tau"] > 1.3  # an untrained drafter stays at about 1
