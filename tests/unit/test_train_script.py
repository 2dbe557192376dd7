"""`scripts/train_drafter.py` from a tiny target to drafters that load, and what it refuses."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cli, commands
from dflash_jax.safetensors_io import read_file
from dflash_jax.train import run as training
from dflash_jax.weights import load_drafter, load_target
from scripts import train_drafter
from scripts.make_tiny import write_tiny_pair

SIZES = (
    "--generate-tokens", "1", "--rows", "64", "--length", "192", "--held-out", "4", "--eval-sets",
    "", "--dtype", "float32", "--attention", "xla", "--taps=-1,0", "--mask-id", "306",
    "--block-rows", "4", "--layers", "1", "--ffn", "32", "--selector-rank", "4", "--batch", "4",
    "--markov-rank", "4", "--mtp-ffn", "32",
    "--anchors", "8", "--log-every", "2", "--measure-seconds", "0", "--checkpoint-seconds", "0",
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_tiny_pair(tmp_path_factory.mktemp("pair"), target="llama", num_layers=2).target


def records(folder, event: str) -> list[dict]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


@pytest.mark.slow
def test_a_run_writes_drafters_and_goes_on_where_it_ended(tmp_path, target, capsys, monkeypatch):
    monkeypatch.setattr(commands, "keep_executables", lambda: None)  # a setting of the process
    out = tmp_path / "out"
    kinds = "dspark", "mtp"
    command = ["--target", str(target), "--out", str(out), *SIZES, "--drafters", ",".join(kinds)]
    assert train_drafter.main([*command, "--steps", "3"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((out / "results.json").read_text())
    assert result["steps"] == 3 and not result["errors"]
    assert {p.name for p in out.iterdir()} == {
        "log.jsonl", "results.json", *kinds, "corpus.npz", "tests.npz", "corpus.json",
        "checkpoint.npz",
    }  # fmt: skip
    for kind in kinds:
        drafter = load_drafter(out / kind, load_target(target))
        assert drafter.config.kind == kind and drafter.config.max_drafts == 3
        assert result["sizes"][kind] == (out / kind / "model.safetensors").stat().st_size
        ask = ["decode", "--prompt-ids", "5,6,7", "--check", "--max-new-tokens", "8"]
        pair = ["--target", str(target), "--drafter", str(out / kind)]
        assert cli.main([*ask, *pair, "--page-size", "8"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["certificate"]["holds"]
        for what in ("trained", "int8"):
            assert all(1 <= tau <= 4 for tau in result[f"held_out_{what}"][kind].values())
    assert records(out, "held_out") and records(out, "training")[0]["held_out"] == 4
    assert len(records(out, "sample")) == 12

    corpus = (out / "corpus.npz").read_bytes()
    assert train_drafter.main([*command, "--steps", "5", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 5
    assert (out / "corpus.npz").read_bytes() == corpus
    assert records(out, "training")[-1]["from_step"] == 3
    assert len(records(out, "generated")) == 1

    for change, what in (
        (["--seed", "1"], "corpus.json: made with --seed 0, and --resume came with 1"),
        (["--block-rows", "5"], "checkpoint.npz: made with --block-rows 4, and --resume came"),
        (
            ["--drafters", "dflash"],
            "checkpoint.npz: made with --drafters ['dspark', 'mtp'], and",
        ),
        (["--ffn", "48"], "checkpoint.npz: a checkpoint of drafters of other shapes"),
    ):
        assert train_drafter.main([*command, "--steps", "5", "--resume", *change]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert what in last and last.startswith("train_drafter.py: "), last


def test_a_drafter_that_cannot_be_written_does_not_lose_the_other(tmp_path, monkeypatch):
    write = training.write_drafter

    def broken(folder, config, tensors, **how):
        if config == "spoilt":
            raise ValueError("drafter config: z-lab's keys cannot say this")
        (folder).mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"12345")

    monkeypatch.setattr(training, "write_drafter", broken)
    assert write is not broken
    done = training.export(tmp_path, {"a": "spoilt", "b": "fine"}, {"a": {}, "b": {}})
    assert done.sizes == {"b": 5}
    assert list(done.errors) == ["a"] and "z-lab's keys cannot say" in done.errors["a"]


def test_what_is_exported_is_int8_within_half_a_step_and_bf16_norms(tmp_path, target):
    params = load_drafter(target.parent / "drafter", load_target(target))
    tensors = {n: jnp.asarray(x) for n, x in training.drafter_tensors(params).items()}
    done = training.export(tmp_path, {"tiny": params.config}, {"tiny": tensors})
    assert not done.errors
    stored = read_file(tmp_path / "tiny" / "model.safetensors")
    assert stored["norm.weight"].dtype == jnp.bfloat16
    assert stored["fc.weight"].dtype == np.int8
    back = training.int8_rounded(tmp_path, ("tiny",), load_target(target))["tiny"]
    for name, x in tensors.items():
        if x.ndim == 2:
            axis = 0 if name.endswith("_codebook") else 1
            step = jnp.abs(x).max(axis=axis, keepdims=True) / 127
            # A hair above one half: the scale itself is rounded to f32.
            assert bool((jnp.abs(back[name] - x) <= 0.5001 * step).all()), name
        else:
            np.testing.assert_array_equal(back[name], x.astype(jnp.bfloat16).astype(jnp.float32))


# Bad input: one sentence, before anything compiles


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path, target):
    """Run with some arguments changed; (exit code, the one line on stderr)."""

    def no_load(*args, **how):
        raise AssertionError("weights were loaded before the arguments were checked")

    monkeypatch.setattr(training, "load_target", no_load)

    def attempt(*changes: str, steps: tuple[str, ...] = ("--steps", "2")) -> tuple[int, str]:
        base = ["--target", str(target), "--out", str(tmp_path / "out"), *SIZES, *steps]
        code = train_drafter.main([*base, *changes])
        out, err = capsys.readouterr()
        assert not out and len(err.splitlines()) == 1, err
        assert not list(tmp_path.rglob("*.part")) and not (tmp_path / "out").exists()
        return code, err

    return attempt


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--drafters", "dflash,eagle"], "'dflash,eagle', wanted one or more of dflash, dflash2"),
        (["--drafters", "dflash,dflash"], "wanted one or more of"),
        (["--eval-sets", "gsm8k,mbpp"], "'gsm8k,mbpp', wanted one or more of gsm8k, humaneval"),
        (["--taps", "0,1"], "wanted ids up to 0"),
        (["--taps=0,-1"], "not strictly increasing"),
        (["--taps=-2,0"], "target_layer_ids [-2, 0] leave the target's layers"),
        (["--taps", "0,x"], "'0,x', wanted whole numbers divided by commas"),
        (["--mask-id", "305"], "the mask token, id 305, ends an answer"),
        (["--mask-id", "307"], "mask_token_id 307 is outside the vocabulary of 307"),
        (["--batch", "0"], "--batch: '0', wanted a whole number from 1 on"),
        (["--learning-rate", "nan"], "'nan', wanted a number from 0 on"),
        (["--length", "100"], "--length 100, wanted 32 or a multiple of 64"),
        (["--length", "8192"], "--length 8192, and the target's context is 4096"),
        (["--anchors", "193"], "--anchors 193, wanted at most --length 192"),
        (["--resume"], "--resume: no corpus.npz in"),
        (["--minutes", "1"], "--minutes and --steps: both came"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_wrong_command_ends_with_code_two(refused, changes, says):
    code, err = refused(*changes)
    assert code == 2 and says in err and err.startswith("train_drafter.py: "), err


def test_neither_steps_nor_minutes_is_refused(refused):
    code, err = refused(steps=())
    assert code == 2 and "--minutes and --steps: neither came, wanted one of them" in err


def test_a_mask_token_that_is_not_in_the_vocabulary_is_refused(capsys, tmp_path, target):
    base = ["--target", str(target), "--out", str(tmp_path / "out"), "--steps", "1", "--taps", "0"]
    assert train_drafter.main(base) == 2
    err = capsys.readouterr().err
    assert "--mask-token '<reponame>' is not in the vocabulary of" in err
    assert len(err.splitlines()) == 1


def test_a_target_that_is_not_there_ends_with_code_one(refused, tmp_path):
    code, err = refused("--target", str(tmp_path / "nothing"))
    assert code == 1 and "no such folder or file" in err


def test_an_out_that_is_a_file_ends_with_code_one(capsys, tmp_path, target):
    (tmp_path / "out").write_text("mine")
    command = ["--target", str(target), "--out", str(tmp_path / "out"), *SIZES, "--steps", "1"]
    assert train_drafter.main(command) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert (tmp_path / "out").read_text() == "mine"


def test_help_shows_defaults_and_an_example(capsys):
    assert train_drafter.main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("default: 0.0015", "default: 4,10,16,22,28", "(default: 0)", "example: python"):
        assert words in text, words
