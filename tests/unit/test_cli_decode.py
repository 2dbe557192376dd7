"""`dflash decode` and `dflash plan` on a tiny checkpoint: what goes where, and the exit codes."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import cli, commands, engine, executable_cache, memory, pair_commands
from dflash_jax.params import Params
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.weights import load_drafter, load_target
from scripts.make_tiny import write_tiny_pair

BUDGET = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_tiny_pair(tmp_path_factory.mktemp("pair"), drafter="dflash", num_layers=2)


@pytest.fixture
def dflash(capsys, monkeypatch, pair):
    """Run a command on the tiny target: (exit code, stdout lines, stderr)."""
    monkeypatch.setattr(commands, "keep_executables", lambda: None)  # a setting of the process

    def run(command, *argv, target=pair.target):
        code = cli.main([command, *argv, "--target", str(target)])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


def decode_arguments(*argv, drafter="prompt_lookup"):
    return (*argv, "--drafter", drafter, "--max-new-tokens", str(BUDGET), "--ignore-eos")


@pytest.fixture(scope="module")
def expected(pair):
    """What the library says to the prompt "the end"."""
    target, tokenizer = load_target(pair.target), Tokenizer.load(pair.target)
    params = Params(target=target, draft=dj.prompt_lookup_drafter())
    ids = tokenizer.encode_chat([{"role": "user", "content": "the end"}])
    (got,) = dj.generate(params, ids, tokenizer=tokenizer, eos_ids=[], max_new_tokens=BUDGET)
    return got


def test_text_goes_to_stdout_and_the_last_line_is_one_json_object(dflash, expected):
    code, out, err = dflash("decode", *decode_arguments("the end"))
    assert code == 0
    record = json.loads(out[-1])
    assert "\n".join(out[:-1]) == "\n".join(expected.text.splitlines())
    assert record["text"] == expected.text and record["ids"] == list(expected.ids)
    assert record["mode"] == "chat" and record["stats"]["num_tokens"] == [BUDGET]
    assert record["stats"]["tau"] >= 1 and "bonus" in record["stats"]["definitions"]["tau"]
    for words in ("chat template", "memory:", "tau", "tokens/s", "histogram"):
        assert words in err


def test_json_alone_is_one_line(dflash, expected):
    code, out, err = dflash("decode", *decode_arguments("the end", "--json", "--no-stats"))
    assert code == 0 and len(out) == 1 and "tau" not in err
    assert json.loads(out[0])["text"] == expected.text


def test_the_script_is_the_same_door(pair, expected):
    argv = decode_arguments("the end", "--json", "--target", str(pair.target))
    kept = pair.target.parent / "cache" / "executables"
    before = None
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "scripts/decode.py", *argv],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": ".", "DFLASH_CACHE": str(kept.parent)},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["text"] == expected.text
        # Compiled programs are kept by the command, never by an import. Whatever is compiled is
        # written, so a second process that writes nothing has compiled nothing.
        names = sorted(path.name for path in kept.glob("*-cache"))
        assert names and before in (None, names)
        before = names


def test_raw_text_and_ids_skip_the_template(dflash, pair):
    tokenizer = Tokenizer.load(pair.target)
    code, out, err = dflash("decode", *decode_arguments("the end", "--raw", "--json"))
    assert code == 0 and "raw text" in err
    raw = json.loads(out[-1])
    assert raw["mode"] == "raw" and raw["stats"]["prompt_tokens"] == [
        len(tokenizer.encode("the end"))
    ]
    ids = ",".join(map(str, tokenizer.encode("the end")))
    code, out, _ = dflash("decode", *decode_arguments("--prompt-ids", ids, "--json"))
    assert code == 0 and json.loads(out[-1])["ids"] == raw["ids"]


def test_a_system_prompt_changes_what_is_asked(dflash, expected):
    code, out, _ = dflash("decode", *decode_arguments("the end", "--system", "no", "--json"))
    prompt_tokens = json.loads(out[-1])["stats"]["prompt_tokens"][0]
    assert code == 0 and prompt_tokens > expected.stats.prompt_tokens[0]


def test_check_prints_a_certificate(dflash):
    code, out, err = dflash("decode", *decode_arguments("the end", "--check"))
    proof = json.loads(out[-1])["certificate"]
    assert code == 0 and proof["holds"] and proof["num_tokens"] == BUDGET
    assert f"equal: {BUDGET} tokens" in err and proof["executable"] in err


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda one: {"hashes": (*one.hashes[:-1], one.hashes[-1] ^ 1)}, "token 19: token"),
        (lambda one: {"ids": (one.ids[0] ^ 1, *one.ids[1:])}, "token 0: "),
        (lambda one: {"ids": one.ids[:-1]}, "20 tokens drafted, 19 plain"),
        (lambda one: {"finish_reason": "stop"}, "ends by length drafted, stop plain"),
    ],
    ids=["a-bit-of-a-logit", "a-token", "the-length", "the-end"],
)
def test_check_fails_on_any_difference(dflash, monkeypatch, spoil, message):
    honest = engine.generate

    def generate(*args, plain=False, **options):
        found = honest(*args, plain=plain, **options)
        return [replace(one, **spoil(one)) for one in found] if plain else found

    monkeypatch.setattr(engine, "generate", generate)
    code, out, err = dflash("decode", *decode_arguments("the end", "--check"))
    assert code == 1 and "DIFFERENT" in err and message in err
    assert json.loads(out[-1])["certificate"]["holds"] is False


def test_a_file_of_prompts_gives_a_json_line_each(dflash, expected, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "the end", "id": "first"},
        {"messages": [{"role": "user", "content": "the end"}], "max_new_tokens": 5},
        {"prompt": "one more", "max_new_tokens": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = dflash("decode", *decode_arguments("--prompts", str(path), "--batch", "2"))
    *answers, last = map(json.loads, out)
    assert code == 0 and last["prompts"] == 3 and last["stats"]["num_tokens"] == [BUDGET, 5, 1]
    by_index = sorted(answers, key=lambda one: one["index"])
    assert [one["id"] for one in by_index] == ["first", None, None]
    assert by_index[0]["ids"] == list(expected.ids)
    assert by_index[1]["ids"] == list(expected.ids[:5])
    arguments = decode_arguments("--prompts", str(path), "--batch", "2", "--json", "--no-stats")
    code, out, _ = dflash("decode", *arguments)
    assert code == 0 and len(out) == 1 and json.loads(out[0])["answers"] == by_index


@pytest.mark.parametrize(
    "drafter, accepted", [("oracle", 7), ("poison:3", 3), ("poison:0", 0), ("poison", 3)]
)
def test_forced_acceptance_is_what_was_asked_for(dflash, expected, drafter, accepted):
    code, out, _ = dflash("decode", *decode_arguments("the end", "--json", drafter=drafter))
    record = json.loads(out[-1])
    (counts,) = record["stats"]["accepted"]
    assert code == 0 and record["ids"] == list(expected.ids)
    assert set(counts[:-1]) <= {accepted} and counts[0] == accepted


def test_an_oracles_later_batches_wait_for_the_earlier_ones(dflash, tmp_path):
    """Each batch is a call of its own, after a plain decode that is no part of the figures."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the end"}\n' * 3)
    arguments = decode_arguments("--prompts", str(path), "--json", drafter="oracle")
    code, out, _ = dflash("decode", *arguments)
    stats = json.loads(out[-1])["stats"]
    first, queued = stats["ttft_seconds"], stats["queue_seconds"]
    assert code == 0 and first[0] < queued[1] < first[1] < queued[2] < first[2]


def test_an_oracles_batches_need_not_all_draw(dflash, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the end", "temperature": 1, "seed": 3}\n{"prompt": "the end"}\n')
    arguments = decode_arguments("--prompts", str(path), "--json", drafter="oracle")
    code, out, err = dflash("decode", *arguments, "--no-draft-sampling")
    assert code == 0, err
    assert [len(one["ids"]) for one in json.loads(out[-1])["answers"]] == [BUDGET, BUDGET]


def test_eos_ids_replace_the_models_and_ignoring_them_goes_on(dflash, pair, expected):
    stop = expected.ids[4]
    given = ("the end", "--drafter", "prompt_lookup", "--max-new-tokens", str(BUDGET), "--json")
    code, out, _ = dflash("decode", *given, "--eos-ids", str(stop))
    record = json.loads(out[-1])
    assert code == 0 and record["finish_reason"] == "stop"
    assert record["ids"] == list(expected.ids[: expected.ids.index(stop) + 1])
    # generation_config.json names further ones; the union of all stops an answer.
    folder = pair.target.parent / "stops"
    shutil.copytree(pair.target, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 305]}))
    code, out, _ = dflash("decode", *given, target=folder)
    assert json.loads(out[-1])["ids"] == record["ids"]
    code, out, _ = dflash("decode", *given, "--ignore-eos", target=folder)
    assert json.loads(out[-1])["ids"] == list(expected.ids)


def test_without_a_tokenizer_ids_go_in_and_come_out(dflash, pair, tmp_path):
    folder = tmp_path / "bare"
    shutil.copytree(pair.target, folder, ignore=shutil.ignore_patterns("*token*", "chat*"))
    code, out, _ = dflash("decode", *decode_arguments("--prompt-ids", "1,2,3"), target=folder)
    record = json.loads(out[-1])
    assert code == 0 and out[0] == ",".join(map(str, record["ids"])) and record["text"] is None
    code, out, err = dflash("decode", *decode_arguments("the end"), target=folder)
    assert code == 1 and out == [] and "no tokenizer.json" in err


def test_an_interrupt_ends_with_a_word_and_code_1(dflash, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "generate", interrupted)
    code, out, err = dflash("decode", *decode_arguments("the end"))
    assert code == 1 and out == [] and err.endswith("dflash: interrupted\n")


@pytest.mark.parametrize(
    "module, name, argv",
    [(commands, "_plan", ["plan"]), (pair_commands, "_doctor", ["doctor"])]
    + [(executable_cache, "report", ["cache"])],
)
def test_a_reader_that_goes_away_ends_it_without_a_word(monkeypatch, capsys, module, name, argv):
    def closed(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(commands, "keep_executables", lambda: None)
    monkeypatch.setattr(module, name, closed)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # `main` takes it away
    assert cli.main(argv) == 1
    assert capsys.readouterr().err == ""


def test_an_answer_that_stdout_cannot_show_ends_with_code_1(dflash, monkeypatch):
    def generate(*args, **options):
        "ü".encode("ascii")

    monkeypatch.setattr(engine, "generate", generate)
    code, out, err = dflash("decode", *decode_arguments("the end"))
    assert code == 1 and out == [] and "'ascii' codec can't encode" in err.splitlines()[-1]


@pytest.fixture
def no_generate(monkeypatch):
    def reached(*args, **options):
        raise AssertionError("must be refused before anything compiles")

    monkeypatch.setattr("dflash_jax.run.run", reached)
    monkeypatch.setattr("dflash_jax.engine.run", reached)


@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["hi", "--drafter", "DRAFTER", "--num-drafts", "8"], 2, "num_drafts is 8"),
        (["hi", "--drafter", "dflash2"], 2, "our drafter for smollm2"),
        (["hi", "--drafter", "poison:8"], 2, "poison:K with K from 0 to 7"),
        (["hi", "--drafter", "poison:x"], 2, "poison:K with K from 0 to 7"),
        (["hi", "--drafter", "none", "--num-drafts", "2"], 2, "proposes nothing"),
        (["hi", "--drafter", "none", "--check"], 2, "--drafter is none"),
        (["hi", "--max-context", "8"], 2, "wanted at most 7: the context holds 8"),
        (["hi", "--max-context", "5000"], 2, "built for 4096"),
        (["--prompt-ids", "5,307"], 2, "token id 307, outside the vocabulary of 306"),
        (["hi", "--eos-ids", "307"], 2, "eos id 307"),
        (["hi", "--drafter", "no-such-folder"], 1, "no such folder"),
        (["hi", "--drafter", ""], 1, "drafter '': no such folder"),
        (["h\udcff"], 2, "prompt 0: text to encode holds U+DCFF"),
        (["hi", "--system", "\udcff"], 2, "prompt 0: text to encode holds U+DCFF"),
        (["hi", "--drafter", "TARGET"], 1, "architecture"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_the_models_ends_in_one_sentence(
    dflash, no_generate, pair, argv, code, message
):
    names = {"DRAFTER": str(pair.drafter), "TARGET": str(pair.target)}
    found, out, err = dflash("decode", *(names.get(word, word) for word in argv))
    (said,) = [line for line in err.splitlines() if line.startswith("dflash")]
    assert found == code and message in said and out == []


def test_kernels_that_are_not_built_are_named(dflash):
    for command in (("decode", *decode_arguments("hi")), ("plan",)):
        code, out, err = dflash(*command, "--impl", "pallas")
        assert code == 2 and out == [] and "pallas" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "gpt2"}', "'gpt2' is not supported"),
        ("model.safetensors", "short", "model.safetensors"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("config.json", None, "config.json"),
        ("model.safetensors", None, "safetensors"),
    ],
    ids=["broken-config", "gpt2", "broken-weights", "broken-tokenizer", "no-config", "no-weights"],
)
def test_a_damaged_checkpoint_ends_in_one_sentence_and_code_1(
    dflash, no_generate, pair, tmp_path, name, content, message
):
    folder = tmp_path / "damaged"
    shutil.copytree(pair.target, folder)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    code, out, err = dflash("decode", "hi", target=folder)
    (said,) = [line for line in err.splitlines() if line.startswith("dflash")]
    assert code == 1 and out == [] and message in said


def test_a_target_without_chat_template_is_raw(dflash, pair, tmp_path):
    folder = tmp_path / "raw"
    shutil.copytree(pair.target, folder, ignore=shutil.ignore_patterns("chat_template*"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for option in (["--chat"], ["--system", "x"]):
        code, _, err = dflash("decode", *decode_arguments("hi", *option), target=folder)
        assert code == 2 and f"{option[0]} needs a chat template" in err
    code, out, _ = dflash("decode", *decode_arguments("the end", "--json"), target=folder)
    assert code == 0 and json.loads(out[-1])["mode"] == "raw"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_plan_counts_the_bytes_that_are_then_loaded(dflash, tmp_path, family, kind):
    at = write_tiny_pair(tmp_path, target=family, drafter=kind, tied=family == "llama")
    code, out, _ = dflash("plan", "--drafter", str(at.drafter), "--batch", "2", target=at.target)
    record = json.loads(out[-1])
    target = load_target(at.target)
    loaded = {"target weights": target, "drafter weights": load_drafter(at.drafter, target)}
    for name, params in loaded.items():
        assert record["bytes"][name] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert code == 0 and record["plan"]["batch"] == 2 and "total" in out[-2]


def test_the_memory_estimate_counts_every_carrier(pair):
    target = load_target(pair.target)
    draft = load_drafter(pair.drafter, target).config
    fixed = dj.plan(target.config, draft, batch=2, max_context=256, dtype="float32")
    rows = dict(memory.estimate(target.config, draft, fixed))
    carriers = dj.init_state(fixed), dj.init_buffers(fixed), dj.init_scratch(draft, fixed=fixed)
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(carriers))
    counted = sum(size for name, size in rows.items() if "weights" not in name)
    assert np.isclose(counted, real, rtol=0.01)  # per-sequence counters are not worth a row
