"""The drafters that come with the package, and that what is said of them is in the logs."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from dflash_jax.config import TargetConfig
from dflash_jax.safetensors_io import read_file
from dflash_jax.weights import check_pair, load_drafter, packaged_drafters, read_draft_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dflash_jax" / "assets" / "drafters"
LOGS = ROOT / "docs" / "training"
NAMES = packaged_drafters()
MIB = 2**20

# SmolLM2-135M-Instruct, so that this test needs no download.
SMOLLM2 = TargetConfig.from_hf(
    {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
STOPS = (0, 2)  # <|endoftext|>, <|im_end|>


def kind_of(name: str) -> str:
    return name.removeprefix("smollm2-")


def read_log(name: str) -> list[dict]:
    return [json.loads(line) for line in (LOGS / name).read_text(encoding="utf-8").splitlines()]


def test_drafters_are_small_enough_to_ship():
    sizes = {path: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert max(sizes.values()) <= 10 * MIB
    assert sum(sizes.values()) <= 32 * MIB
    assert {path.parent.name for path in sizes} == set(NAMES)
    assert {"smollm2-dflash", "smollm2-dflash2"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_drafter_fits_smollm2(name):
    config = read_draft_config(name)
    check_pair(SMOLLM2, config, who=name)
    assert config.kind == kind_of(name)
    sizes = config.layer if config.kind == "mtp" else config
    assert (sizes.num_heads, sizes.head_dim) == (SMOLLM2.num_heads, SMOLLM2.head_dim)
    if config.kind != "mtp":  # a head reads no tapped layer and has no mask
        assert config.mask_id not in STOPS
        assert max(config.target_layer_ids) < SMOLLM2.num_layers - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_drafter_loads_and_is_finite(name):
    params = load_drafter(name, dtype="float32")
    stored = read_file(FOLDER / name / "model.safetensors")
    matrices = [n for n, x in stored.items() if x.ndim == 2]
    assert matrices and all(stored[n].dtype == np.int8 for n in matrices)
    for x in map(np.asarray, jax.tree.leaves(params)):
        assert np.isfinite(x).all() and x.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_model_card_says_what_the_logs_say(name):
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    kind = kind_of(name)
    logs = [read_log(found) for found in re.findall(r"docs/training/([\w.-]+\.jsonl)", card)]
    (log,) = [records for records in logs if records[0].get("event") == "start"]
    (acceptance,) = [records for records in logs if "tau" in records[0]]
    result = log[-1]
    corpus = next(r for r in log if r["event"] == "corpus")
    training = next(r for r in log if r["event"] == "training")
    facts = [
        f"{result['steps']:,} steps",
        f"{corpus['rows_shared_with_eval']:,} rows",
        f"{training['rows']:,} conversations",
        f"{(FOLDER / name / 'model.safetensors').stat().st_size:,} bytes",
    ]
    table = card[card.index("## Acceptance") :].splitlines()
    for record in acceptance:
        row = next(line for line in table if line.startswith(f"| {record['drafter']} "))
        facts.append(row if f" {record['tau']:.2f} " in row else f"{record} in {row}")
    for group in ("held_out", "eval"):
        for style, tau in result[f"{group}_trained"][kind].items():
            row = next(line for line in card.splitlines() if line.startswith(f"| {style} "))
            assert f"| {tau:.3f} | {result[f'{group}_int8'][kind][style]:.3f} |" in row, style
    for words in (*facts, "Apache", "SmolLM2-135M-Instruct", "scripts/train_drafter.py",
                  "scripts/eval_acceptance.py"):  # fmt: skip
        assert words in card, words


def test_dflash2_is_above_dflash_and_both_are_above_prompt_lookup():
    tau = {
        (r["drafter"], r["set"]): r["tau"] for r in read_log("acceptance-smollm2-2026-11-30.jsonl")
    }
    for name in ("gsm8k", "humaneval", "mt_bench"):
        order = [tau[kind, name] for kind in ("none", "prompt_lookup", "dflash", "dflash2")]
        assert order == sorted(order) and order[0] == 1.0, name
    assert min(tau["dflash2", "gsm8k"], tau["dflash2", "humaneval"]) >= 3.0


def test_the_held_out_curve_in_the_documentation_is_the_logs():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) \|(.*)\|$", text, flags=re.M)
    curve = {r["step"]: r for r in read_log("smollm2-2026-11-30.jsonl") if r["event"] == "held_out"}
    assert len(rows) >= 6
    for step, cells in rows:
        record = curve[int(step.replace(",", ""))]
        want = [record[k][s] for k in ("dflash", "dflash2") for s in ("chat", "code", "math")]
        assert [float(cell) for cell in cells.split("|")] == [round(x, 2) for x in want], step


def test_the_notice_names_what_ships():
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for words in ("dflash_jax/assets/drafters", "SmolLM2-135M-Instruct", "GSM8K", "HumanEval",
                  "MT-bench", "MIT", "Apache License 2.0"):  # fmt: skip
        assert words in notice, words
