"""The drafters that come with the package, and that what is said of them is in the logs."""

import itertools
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
ACCEPTANCE = "acceptance-smollm2-2026-12-01.jsonl"
RUNS = {
    ("dflash", "dflash2"): "smollm2-2026-11-30.jsonl",
    ("dspark", "mtp"): "smollm2-chained-2026-12-01.jsonl",
}
TITLES = {"dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark", "mtp": "MTP"}
SETS = ("gsm8k", "humaneval", "mt_bench")
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


def first_table(text: str, heading: str) -> dict[str, list[str]]:
    """Cells by the first word of each row of the first table below a heading."""
    lines = text[text.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| ---")) + 1
    rows = itertools.takewhile(lambda line: line.startswith("| "), lines[start:])
    cells = [line.strip("| ").split(" | ") for line in rows]
    return {name.split(" ")[0]: rest for name, *rest in cells}


def tau_cells(records: list[dict]) -> dict[str, list[str]]:
    """What such a table says of acceptance: sets in order, each at temperature 0 and 1."""
    by_drafter: dict[str, list[str]] = {}
    for record in records:
        by_drafter.setdefault(record["drafter"], []).append(f"{record['tau']:.2f}")
    return by_drafter


def read_log(name: str) -> list[dict]:
    return [json.loads(line) for line in (LOGS / name).read_text(encoding="utf-8").splitlines()]


def test_drafters_are_small_enough_to_ship():
    sizes = {path: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert max(sizes.values()) <= 10 * MIB
    assert sum(sizes.values()) <= 32 * MIB
    assert {path.parent.name for path in sizes} == set(NAMES)
    assert {kind_of(name) for name in NAMES} == {kind for run in RUNS for kind in run}


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
    assert f"docs/training/{next(log for run, log in RUNS.items() if kind in run)}" in card
    result = log[-1]
    corpus = next(r for r in log if r["event"] == "corpus")
    training = next(r for r in log if r["event"] == "training")
    facts = [
        f"{result['steps']:,} steps",
        f"{corpus['rows_shared_with_eval']:,} rows",
        f"{training['rows']:,} conversations",
        f"{(FOLDER / name / 'model.safetensors').stat().st_size:,} bytes",
    ]
    assert first_table(card, "## Acceptance") == tau_cells(acceptance)
    for group in ("held_out", "eval"):
        for style, tau in result[f"{group}_trained"][kind].items():
            row = next(line for line in card.splitlines() if line.startswith(f"| {style} "))
            assert f"| {tau:.3f} | {result[f'{group}_int8'][kind][style]:.3f} |" in row, style
    for words in (*facts, "Apache", "SmolLM2-135M-Instruct", "scripts/train_drafter.py",
                  "scripts/eval_acceptance.py"):  # fmt: skip
        assert words in card, words


def test_the_acceptance_file_has_every_drafter_on_every_set_at_both_temperatures():
    records = read_log(ACCEPTANCE)
    drafters = ("none", "prompt_lookup", *(kind for run in RUNS for kind in run))
    assert [(r["drafter"], r["set"], r["temperature"]) for r in records] == [
        (drafter, name, heat) for drafter in drafters for name in SETS for heat in (0.0, 1.0)
    ]
    fields = ["drafter", "set", "temperature", "prompts", "tau", "cycles", "tokens"]
    for record in records:
        assert list(record) == fields  # no times: the drafters ran side by side
        # The first token of each answer comes from its prompt, not from a cycle.
        drawn = record["tokens"] - record["prompts"]
        assert record["tau"] == pytest.approx(drawn / record["cycles"], abs=1e-4)
    assert {r["set"]: r["prompts"] for r in records} == dict(zip(SETS, (100, 164, 80), strict=True))


@pytest.mark.parametrize("name", SETS)
def test_drafters_are_in_the_order_that_the_documentation_gives(name):
    tau = {
        (r["drafter"], r["temperature"]): r["tau"] for r in read_log(ACCEPTANCE) if r["set"] == name
    }
    greedy = [tau[kind, 0] for kind in ("none", "prompt_lookup", "dflash", "dspark", "dflash2")]
    assert greedy == sorted(set(greedy)) and greedy[0] == 1.0
    assert tau["mtp", 0] < tau["dflash2", 0]
    assert tau["dflash2", 0] >= (2.5 if name == "mt_bench" else 3.0)
    sampled = [tau[kind, 1] for kind in ("none", "prompt_lookup", "dflash", "dflash2", "dspark")]
    assert sampled == sorted(set(sampled)) and sampled[0] == 1.0
    assert tau["prompt_lookup", 1] < tau["mtp", 1] < tau["dflash2", 1]


def test_the_readme_says_of_acceptance_what_the_log_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = list(tau_cells(read_log(ACCEPTANCE)).values())
    table = first_table(text.replace("**", ""), "## Acceptance")
    assert list(table.values()) == cells and f"docs/training/{ACCEPTANCE}" in text


def test_the_notebooks_say_of_acceptance_what_the_log_says():
    tour, drafters = (
        (ROOT / "notebooks" / name).read_text(encoding="utf-8")
        for name in ("01_tour.ipynb", "02_drafters.ipynb")
    )
    cells = tau_cells(read_log(ACCEPTANCE))
    for kind, title in TITLES.items():
        greedy, sampled = cells[kind][::2], cells[kind][1::2]
        both = [f"{a}, {b}" for a, b in zip(greedy, sampled, strict=True)]
        assert f"| {title} | {' | '.join(greedy)} |" in tour
        assert f"| {title} | {' | '.join(both)} |" in drafters
    assert ACCEPTANCE in tour and ACCEPTANCE in drafters


@pytest.mark.parametrize(("kinds", "log"), RUNS.items(), ids=["/".join(run) for run in RUNS])
def test_the_held_out_curve_in_the_documentation_is_the_logs(kinds, log):
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    curve = {r["step"]: r for r in read_log(log) if r["event"] == "held_out"}
    heads = [f"{TITLES[kind]} chat | code | maths" for kind in kinds]
    rows = first_table(text, f"| step | {' | '.join(heads)} |")
    assert len(rows) >= 6
    for step, cells in rows.items():
        record = curve[int(step.replace(",", ""))]
        want = [record[k][s] for k in kinds for s in ("chat", "code", "math")]
        assert cells == [f"{x:.2f}" for x in want], step


def test_the_notice_names_what_ships():
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for words in ("dflash_jax/assets/drafters", "SmolLM2-135M-Instruct", "GSM8K", "HumanEval",
                  "MT-bench", "MIT", "Apache License 2.0"):  # fmt: skip
        assert words in notice, words
