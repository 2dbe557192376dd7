"""`dflash doctor`: every finding with its colour, its reason and its mend; nothing is compiled."""

import json
import subprocess
import sys

import numpy as np
import pytest

from dflash_jax import doctor
from dflash_jax.cli import main
from dflash_jax.mask_embedding import NAME, write_mask_embedding
from dflash_jax.safetensors_io import read_file, write_file
from dflash_jax.weights import packaged_drafters
from scripts.make_tiny import write_tiny_pair

MODEL = "model.safetensors"


@pytest.fixture
def pair(tmp_path):
    return write_tiny_pair(tmp_path / "pair", drafter="dflash")


def change(folder, drop=(), **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    nested = changes.pop("dflash_config", {})
    config.get("dflash_config", {}).update(nested)
    config |= changes
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def examine(pair, **sizes):
    return doctor.examine(pair.target, pair.drafter, doctor.Sizes(**sizes))


def only(findings, topic):
    mine = [one for one in findings if one.topic == topic]
    assert len(mine) == 1, mine
    return mine[0]


TOPICS = (
    "target drafter width taps mask vocabulary rope windows causality block template memory"
).split()


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_pair_that_fits_is_green_on_every_topic(tmp_path, kind):
    pair = write_tiny_pair(tmp_path, drafter=kind)
    findings = examine(pair)
    assert [one.topic for one in findings] == TOPICS
    assert doctor.verdict(findings) == "green" and not any(one.mend for one in findings)
    rows = {"dspark": "7 rows, 7 drafts; every row drafts"}.get(kind, "8 rows, 7 drafts; the anch")
    assert only(findings, "block").reason.startswith(rows)
    assert only(findings, "template").reason == "a chat template without a thinking mode"


REDS = [
    ({"hidden_size": 48}, "width", "hidden_size is 48 for the drafter and 64"),
    ({"num_target_layers": 9}, "taps", "num_target_layers is 9 for the drafter and 3"),
    ({"vocab_size": 320}, "vocabulary", "vocab_size is 320 for the drafter and 307"),
    ({"block_size": 1}, "drafter", "block_size 1, wanted at least 2"),
    ({"dflash_config": {"mask_token_id": 400}}, "drafter", "mask_token_id 400 is outside"),
    ({"architectures": ["Other"]}, "drafter", "architecture 'Other' is not supported"),
    ({"num_hidden_layers": 3, "layer_types": None}, "drafter", "'layers.2.input_layernorm.weigh"),
    ({"num_hidden_layers": 1, "layer_types": None}, "drafter", "no place for: 'layers.1."),
    ({"intermediate_size": 65}, "drafter", r"has shape [64, 64], wanted [65, 64]"),
]


@pytest.mark.parametrize(("changes", "topic", "reason"), REDS, ids=[r for *_, r in REDS])
def test_what_loading_would_refuse_is_red_with_a_mend(pair, changes, topic, reason):
    change(pair.drafter, **changes)
    findings = examine(pair)
    reds = [one for one in findings if one.level == "red" and one.topic == topic]
    assert any(reason in one.reason and one.mend for one in reds), findings
    assert doctor.verdict(findings) == "red"


AMBERS = [
    ({"dflash_config": {"target_layer_ids": [0, 2]}}, "taps", "the last one is read before the"),
    ({"dflash_config": {"mask_token_id": 65}}, "mask", "but text uses it"),
    ({"rope_theta": None}, "rope", "assumed: its config has no rope_theta, and the target's is 10"),
    ({"max_position_embeddings": 128}, "rope", "made for 128 positions, the target for 4096"),
    (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32},
        "windows",
        "no window counts (sliding_window is 32, use_sliding_window is not true)",
    ),
    (
        {
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 32,
            "use_sliding_window": True,
        },
        "causality",
        "all layers: causal in the block; its config does not say",
    ),
    ({"architectures": None}, "drafter", "its config names no architecture"),
]


@pytest.mark.parametrize(("changes", "topic", "reason"), AMBERS, ids=[r for *_, r in AMBERS])
def test_what_runs_and_may_draft_badly_is_amber_with_a_mend(pair, changes, topic, reason):
    change(pair.drafter, **changes)
    findings = examine(pair)
    mine = [one for one in findings if one.topic == topic and one.level == "amber"]
    assert any(reason in one.reason and one.mend for one in mine), findings
    assert doctor.verdict(findings) == "amber"


def test_taps_that_are_the_usual_ones_plus_one_are_suspected(tmp_path):
    nested = {"dflash_config": {"target_layer_ids": [2, 6]}}
    pair = write_tiny_pair(tmp_path, drafter="dflash", num_layers=9, draft_config=nested)
    tensors = {name: np.array(x) for name, x in read_file(pair.drafter / MODEL).items()}
    tensors["fc.weight"] = tensors["fc.weight"][:, :128]
    write_file(pair.drafter / MODEL, tensors)
    assert only(examine(pair), "taps").level == "green"
    change(pair.drafter, dflash_config={"target_layer_ids": [2, 7]})
    found = only(examine(pair), "taps")
    assert found.level == "amber" and "the usual layers 1, 6, each plus one" in found.reason
    assert "subtract 1" in found.mend
    change(pair.drafter, dflash_config={"target_layer_ids": None})
    usual, unsaid = (one for one in examine(pair) if one.topic == "taps")
    assert usual.level == "green" and "layers 1, 6 of" in usual.reason
    assert unsaid.level == "amber" and unsaid.reason.startswith("its config names no layers")


def test_windows_and_causality_are_told_by_layer(tmp_path):
    pair = write_tiny_pair(tmp_path, drafter="dflash2")
    findings = examine(pair)
    assert only(findings, "windows").reason == "layer 0: the last 32, layer 1: all keys"
    assert only(findings, "causality").reason == "all layers: rows see the whole block"


def test_tables_and_mask_of_its_own_are_told(pair):
    tensors = {name: np.array(x) for name, x in read_file(pair.drafter / MODEL).items()}
    tensors["embed_tokens.weight"] = np.zeros((307, 64), np.float32)
    write_file(pair.drafter / MODEL, tensors)
    write_mask_embedding(pair.drafter / NAME, np.ones(64, np.float32), 306)
    findings = examine(pair)
    assert doctor.verdict(findings) == "green"
    own = [one.reason for one in findings if one.topic == "vocabulary"]
    assert own[1] == "the file has its own embedding; copies of the target's are shared"
    assert "an embedding of its own in mask_embedding.pt" in only(findings, "mask").reason


@pytest.mark.parametrize(
    ("template", "level"),
    [
        ("{% if enable_thinking %}<think>{% endif %}", "amber"),
        (None, "amber"),
        ("{{ 1 }}", "green"),
    ],
)
def test_a_template_with_a_thinking_mode_is_amber(pair, template, level):
    config = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
    (pair.target / "tokenizer_config.json").write_text(json.dumps(config))
    assert only(examine(pair), "template").level == level
    (pair.target / "tokenizer.json").unlink()
    assert "without a tokenizer" in only(examine(pair), "template").reason


def test_memory_is_compared_with_the_device(pair):
    found = only(examine(pair, batch=4, max_context=1000), "memory")
    assert found.level == "green" and "for 4 x 1000 tokens in bfloat16" in found.reason
    assert only(examine(pair, batch=64, device_bytes=1 << 20), "memory").level == "red"
    assert only(examine(pair, max_context=5000), "memory").reason.startswith("plan: max_context")
    assert only(examine(pair, num_drafts=9), "memory").level == "red"


def test_a_target_that_does_not_load_is_the_only_finding(pair):
    change(pair.target, model_type="mamba")
    (found,) = examine(pair)
    assert (found.topic, found.level) == ("target", "red") and "mamba" in found.reason


def test_the_command_prints_a_table_and_one_json_line(pair, capsys):
    assert main(["doctor", str(pair.target), str(pair.drafter)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["verdict"] == "green" and [x["topic"] for x in found["findings"]] == TOPICS
    assert any("taps" in line for line in table)
    change(pair.drafter, hidden_size=48)
    assert main(["doctor", str(pair.target), str(pair.drafter)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verdict"] == "red"


def test_the_command_refuses_what_it_cannot_look_at(pair, capsys):
    assert main(["doctor", str(pair.target)]) == 2
    assert "name the drafter too" in capsys.readouterr().err
    assert main(["doctor", str(pair.target), "dflash2"]) == 2
    assert main(["doctor", "smollm2", "prompt_lookup"]) == 2
    assert "has no weights to look at" in capsys.readouterr().err


def test_the_convert_command_writes_what_doctor_finds_green(pair, tmp_path, capsys):
    new = str(tmp_path / "new")
    ask = ["convert", str(pair.drafter), new, "--form", "speculators", "--target", str(pair.target)]
    assert main(ask) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["form"], last["kind"], last["dtype"]) == ("speculators", "dflash", "float32")
    assert main(["doctor", str(pair.target), new]) == 0
    assert main(ask) == 1
    assert "new: it exists, wanted a new folder" in capsys.readouterr().err


def test_no_backend_starts(pair, tmp_path):
    """Configs and headers alone: a GPU is left to whoever has it."""
    head = write_tiny_pair(tmp_path / "head", target="qwen3_next", drafter="mtp")
    code = (
        "import sys; from dflash_jax import doctor; from jax._src import xla_bridge\n"
        "found = doctor.examine(*sys.argv[1:3]) + doctor.examine(*sys.argv[3:])\n"
        "sys.exit(doctor.verdict(found) != 'green' or xla_bridge.backends_are_initialized())"
    )
    folders = map(str, (pair.target, pair.drafter, head.target, head.drafter))
    done = subprocess.run([sys.executable, "-c", code, *folders])
    assert done.returncode == 0


@pytest.mark.parametrize("drafter", packaged_drafters())
def test_the_shipped_drafters_fit_their_target(tmp_path, drafter):
    """Of the target only the config is read; the int8 files are checked by their headers."""
    smollm2 = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(smollm2))
    findings = doctor.examine(tmp_path, drafter)
    assert [one.topic for one in findings if one.level != "green"] == ["template"]
    assert "without a tokenizer" in only(findings, "template").reason


def test_a_damaged_head_is_red_and_one_of_another_family_amber(tmp_path):
    pair = write_tiny_pair(tmp_path / "pair", drafter="mtp")
    other = write_tiny_pair(tmp_path / "other", target="qwen3_5", drafter="mtp")
    finding = only(doctor.examine(pair.target, other.drafter), "drafter")
    assert (finding.level, finding.reason[:23]) == ("amber", "mtp, a layer of qwen3_5")
    tensors = read_file(pair.drafter / MODEL)
    for lost in ("mtp.fc.weight", "mtp.layers.0."):
        left = {name: x for name, x in tensors.items() if not name.startswith(lost)}
        write_file(pair.drafter / MODEL, left)
        finding = only(examine(pair), "drafter")
        assert finding.level == "red" and lost in finding.reason


@pytest.mark.parametrize("target", ["llama", "qwen3", "qwen3_5", "qwen3_next"])
def test_every_tensor_of_a_head_is_looked_at(tmp_path, target):
    """What came and what was wanted, without loading a number."""
    pair = write_tiny_pair(tmp_path / "pair", target=target, drafter="mtp")
    tensors = {name: np.array(x) for name, x in read_file(pair.drafter / MODEL).items()}
    own = [name for name in tensors if name.startswith("mtp.")]
    assert only(examine(pair), "drafter").level == "green" and len(own) > 10
    for name in own:
        shape = tensors[name].shape
        for cut in range(len(shape)):
            short = np.take(tensors[name], range(shape[cut] - 1), axis=cut)
            write_file(pair.drafter / MODEL, tensors | {name: short})
            finding = only(examine(pair), "drafter")
            assert finding.level == "red", name
            said = f"tensor {name!r} has shape {list(short.shape)}, wanted {list(shape)}"
            assert said in finding.reason
    write_file(pair.drafter / MODEL, tensors | {"mtp.layers.0.extra.weight": tensors[own[0]]})
    reason = only(examine(pair), "drafter").reason
    assert "no place for: 'mtp.layers.0.extra.weight'" in reason


def test_an_mtp_head_is_explained_and_has_no_other_form(tmp_path, capsys):
    pair = write_tiny_pair(tmp_path / "pair", drafter="mtp")
    findings = examine(pair)
    topics = ["target", "drafter", "taps", "vocabulary", "block", "template", "memory"]
    assert [one.topic for one in findings] == topics and doctor.verdict(findings) == "green"
    assert only(findings, "block").reason == "7 drafts, one after another"
    assert "after the final norm" in only(findings, "taps").reason
    change(pair.drafter, hidden_size=48)
    assert only(examine(pair), "width").level == "red"
    change(pair.drafter, hidden_size=64)
    assert main(["convert", str(pair.drafter), str(tmp_path / "new"), "--form", "zlab"]) == 1
    assert "an MTP head has the form of its target's checkpoint alone" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
