import json
import os
import shutil
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest

from dflash_jax import download, packaged
from dflash_jax.safetensors_io import read_file, write_file
from dflash_jax.weights import (
    load_drafter,
    load_target,
    read_configs,
    read_draft_config,
    resolve_target,
)
from scripts.make_tiny import write_tiny_pair
from tests.unit import gguf_files

MODEL = "model.safetensors"
V, E, F, Q, KV = 307, 64, 96, 64, 32  # of the tiny target


@pytest.fixture
def pair(tmp_path):
    return write_tiny_pair(tmp_path / "pair")


def tensors_of(folder):
    return {name: np.array(x) for name, x in read_file(folder / MODEL).items()}


def change_config(folder, drop=(), **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))


def change_tensors(folder, drop=(), **changes):
    """Keyword names use __ for a dot."""
    changes = {name.replace("__", "."): x for name, x in changes.items()}
    kept = {k: v for k, v in tensors_of(folder).items() if k not in drop}
    write_file(folder / MODEL, kept | changes)


def rename_tensors(folder, rename):
    write_file(folder / MODEL, {rename(k): v for k, v in tensors_of(folder).items()})


def equal(a, b):
    return np.asarray(a).dtype == b.dtype and np.array_equal(np.asarray(a), b)


def same_params(a, b):
    a, b = jax.tree.flatten(a), jax.tree.flatten(b)
    return a[1] == b[1] and all(equal(x, np.asarray(y)) for x, y in zip(a[0], b[0], strict=True))


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_every_tensor_of_a_target_reaches_its_place(tmp_path, kind):
    folder = write_tiny_pair(tmp_path, target=kind).target
    t, params = tensors_of(folder), load_target(folder)
    assert equal(params.embed, t["model.embed_tokens.weight"])
    assert equal(params.lm_head, t["lm_head.weight"])
    assert equal(params.norm, t["model.norm.weight"])
    assert len(params.layers) == params.config.num_layers == 3
    for i, layer in enumerate(params.layers):
        at = f"model.layers.{i}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        qkv = [t[f"{attention}{part}_proj.weight"] for part in "qkv"]
        gate_up = [t[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
        assert equal(layer.qkv, np.concatenate(qkv)) and layer.qkv.shape == (Q + 2 * KV, E)
        assert equal(layer.gate_up, np.concatenate(gate_up)) and layer.gate_up.shape == (2 * F, E)
        assert equal(layer.o, t[f"{attention}o_proj.weight"])
        assert equal(layer.down, t[f"{mlp}down_proj.weight"])
        assert equal(layer.input_norm, t[f"{at}input_layernorm.weight"])
        assert equal(layer.post_norm, t[f"{at}post_attention_layernorm.weight"])
        assert layer.qkv_bias is None and layer.o_bias is None and layer.mlp_conv is None
        if kind == "llama":
            assert layer.q_norm is None and layer.k_norm is None
        else:
            assert equal(layer.q_norm, t[f"{attention}q_norm.weight"])
            assert equal(layer.k_norm, t[f"{attention}k_norm.weight"])


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (np.float32, None, np.float32),
        (ml_dtypes.bfloat16, None, ml_dtypes.bfloat16),
        (np.float16, None, np.float32),
        (np.float16, "bfloat16", ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, "float32", np.float32),
        (np.float32, "bfloat16", ml_dtypes.bfloat16),
    ],
)
def test_weights_keep_their_dtype_or_get_the_one_asked_for(pair, stored, asked, expected):
    t = {name: x.astype(stored) for name, x in tensors_of(pair.target).items()}
    write_file(pair.target / MODEL, t)
    params = load_target(pair.target, dtype=asked)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(expected)}
    assert equal(params.layers[1].down, t["model.layers.1.mlp.down_proj.weight"].astype(expected))


def test_a_dtype_without_an_engine_is_refused(pair):
    with pytest.raises(NotImplementedError, match="weights in float16 are not supported"):
        load_target(pair.target, dtype="float16")
    eight = tensors_of(pair.target)["model.embed_tokens.weight"].astype(ml_dtypes.float8_e4m3fn)
    change_tensors(pair.target, model__embed_tokens__weight=eight)
    with pytest.raises(NotImplementedError, match="target: weights in float8_e4m3fn"):
        load_target(pair.target)
    with pytest.raises(NotImplementedError, match="'model.embed_tokens.weight' is float8_e4m3fn"):
        load_target(pair.target, dtype="float32")


def test_a_quantised_checkpoint_is_named(pair):
    change_config(pair.target, quantization_config={"quant_method": "awq"})
    with pytest.raises(NotImplementedError, match=r"quantised weights \(awq\)"):
        load_target(pair.target)


def test_a_tied_target_without_a_head_uses_its_embedding(tmp_path):
    folder = write_tiny_pair(tmp_path, tied=True).target
    params = load_target(folder)
    assert params.head is None and params.lm_head is params.embed


def test_a_tied_target_with_a_copy_of_its_embedding_shares_it(tmp_path):
    folder = write_tiny_pair(tmp_path, tied=True).target
    change_tensors(folder, lm_head__weight=tensors_of(folder)["model.embed_tokens.weight"])
    assert load_target(folder).head is None


def test_a_tied_target_with_another_head_is_a_contradiction(tmp_path):
    folder = write_tiny_pair(tmp_path, tied=True).target
    change_tensors(folder, lm_head__weight=np.ones((V, E), np.float32))
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but 'lm_head.weight' diff"):
        load_target(folder)


def test_an_untied_target_without_a_head_names_the_tensor(pair):
    change_tensors(pair.target, drop=["lm_head.weight"])
    with pytest.raises(ValueError, match="target: tensor 'lm_head.weight' is missing"):
        load_target(pair.target)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_a_nested_config_may_have_another_prefix_and_a_vision_tower(pair, prefix):
    plain = load_target(pair.target)
    rename_tensors(
        pair.target,
        lambda name: prefix + name.removeprefix("model.") if name[:6] == "model." else name,
    )
    change_tensors(pair.target, model__visual__patch__weight=np.zeros((2, 2), np.float32))
    with pytest.raises(ValueError, match="embed_tokens|no place for"):
        load_target(pair.target)  # the flat config says otherwise
    path = pair.target / "config.json"
    inner = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "some_vl", "text_config": inner}))
    assert same_params(load_target(pair.target), plain)


def test_shards_and_fused_exports_give_the_same_params(pair):
    plain = load_target(pair.target)
    t = tensors_of(pair.target)
    for i in range(3):
        at = f"model.layers.{i}."
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        parts = [t.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        t[f"{attention}qkv_proj.weight"] = np.concatenate(parts)
        parts = [t.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
        t[f"{mlp}gate_up_proj.weight"] = np.concatenate(parts)
    os.remove(pair.target / MODEL)
    names = sorted(t)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, owned in shards.items():
        write_file(pair.target / shard, {name: t[name] for name in owned})
    index = {name: shard for shard, owned in shards.items() for name in owned}
    (pair.target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert same_params(load_target(pair.target), plain)


def test_attention_biases_are_joined_like_their_matrices(pair):
    rng = np.random.default_rng(0)
    sizes = {"q": Q, "k": KV, "v": KV, "o": E}
    biases = {
        f"model.layers.{i}.self_attn.{part}_proj.bias": rng.standard_normal(n).astype(np.float32)
        for i in range(3)
        for part, n in sizes.items()
    }
    write_file(pair.target / MODEL, tensors_of(pair.target) | biases)
    with pytest.raises(ValueError, match="no place for: 'model.layers.0.self_attn.k_proj.bias'"):
        load_target(pair.target)
    change_config(pair.target, attention_bias=True)
    layer = load_target(pair.target).layers[2]
    at = "model.layers.2.self_attn."
    assert equal(layer.qkv_bias, np.concatenate([biases[f"{at}{p}_proj.bias"] for p in "qkv"]))
    assert equal(layer.o_bias, biases[f"{at}o_proj.bias"])


def test_an_unknown_tensor_is_an_error_and_a_rotary_buffer_is_not(pair):
    buffer = np.zeros(8, np.float32)
    change_tensors(pair.target, model__layers__0__self_attn__rotary_emb__inv_freq=buffer)
    load_target(pair.target)
    change_tensors(pair.target, model__layers__0__mlp__extra__weight=buffer)
    with pytest.raises(ValueError, match="no place for: 'model.layers.0.mlp.extra.weight'"):
        load_target(pair.target)


def test_a_layer_too_many_is_an_error(pair):
    change_config(pair.target, num_hidden_layers=2)
    with pytest.raises(ValueError, match="no place for: 'model.layers.2.* and 8 more"):
        load_target(pair.target)


def test_a_wrong_shape_names_file_tensor_found_and_wanted(pair):
    change_tensors(
        pair.target, model__layers__1__mlp__down_proj__weight=np.zeros((E, 95), np.float32)
    )
    wanted = r"target: tensor 'model.layers.1.mlp.down_proj.weight' has shape \[64, 95\], wanted"
    with pytest.raises(ValueError, match=wanted):
        load_target(pair.target)


def test_a_gguf_target_equals_the_checkpoint_it_was_made_from(tmp_path):
    tensors = gguf_files.hf_tensors(np.random.default_rng(0), 2)
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tensors)
    config, generation = read_configs(path)
    assert config["eos_token_id"] == [2] and generation == {}
    folder = tmp_path / "folder"
    folder.mkdir()
    write_file(folder / MODEL, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    assert same_params(load_target(path), load_target(folder))


def test_a_quantised_gguf_becomes_bfloat16_unless_told_otherwise(tmp_path):
    tensors = gguf_files.hf_tensors(np.random.default_rng(0))
    path = gguf_files.write_gguf(tmp_path / "m.gguf", tensors, kind=gguf_files.Kind.Q4_1)
    assert load_target(path).embed.dtype == ml_dtypes.bfloat16
    assert load_target(path, dtype="float32").embed.dtype == np.float32


def test_the_real_vocabulary_is_the_callers_and_never_above_the_heads(pair):
    assert load_target(pair.target).config.real_vocab == V
    assert load_target(pair.target, real_vocab=306).config.real_vocab == 306
    assert load_target(pair.target, real_vocab=400).config.real_vocab == V


def test_progress_is_told_after_each_layer(pair):
    seen = []
    load_target(pair.target, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_the_default_target_is_downloaded_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(download, "default_model", lambda: tmp_path / "smol.gguf")
    assert resolve_target("smollm2") == tmp_path / "smol.gguf"
    with pytest.raises(FileNotFoundError, match="target 'nowhere': no such folder or file"):
        load_target("nowhere")


def test_configs_of_a_folder_are_both_read(pair):
    config, generation = read_configs(pair.target)
    assert config["eos_token_id"] == 305 and generation == {"eos_token_id": [305, 303]}
    (pair.target / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json: a JSON list, wanted an object"):
        read_configs(pair.target)
    os.remove(pair.target / "config.json")
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
        load_target(pair.target)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_every_tensor_of_a_drafter_reaches_its_place(tmp_path, kind):
    pair = write_tiny_pair(tmp_path, drafter=kind)
    t, params = tensors_of(pair.drafter), load_drafter(pair.drafter, load_target(pair.target))
    for name in ("fc", "hidden_norm", "norm"):
        assert equal(getattr(params, name), t[f"{name}.weight"])
    assert params.fc.shape == (E, 2 * E) and params.config.target_layer_ids == (0, 1)
    rows = [t[f"layers.{i}.self_attn.{part}_proj.weight"] for i in (0, 1) for part in "kv"]
    assert equal(params.fused_kv, np.concatenate(rows)) and params.fused_kv_bias is None
    for i, layer in enumerate(params.layers):
        at = f"layers.{i}."
        assert equal(layer.qkv[:Q], t[f"{at}self_attn.q_proj.weight"])
        assert equal(layer.q_norm, t[f"{at}self_attn.q_norm.weight"])
        for conv in ("attention_conv", "mlp_conv"):
            found = getattr(layer, conv)
            if kind == "dflash":
                assert found is None
            else:
                assert equal(found.base, t[f"{at}{conv}.base_kernel"])
                assert equal(found.projection, t[f"{at}{conv}.kernel_projection.weight"])
    if kind == "dflash":
        assert params.selector is None
    else:
        at = "candidate_selector."
        assert equal(params.selector.hidden_projection, t[f"{at}hidden_projection.weight"])
        assert equal(params.selector.predecessor, t[f"{at}predecessor_codebook"])
        assert equal(params.selector.successor, t[f"{at}successor_codebook"])


def with_model_prefix(name):
    return f"model.{name}"


def with_codebook_weight(name):
    return f"{name}.weight" if name.endswith("_codebook") else name


def with_midlayer(name):
    return name.replace("layers.0.", "midlayer.")


@pytest.mark.parametrize("rename", [with_model_prefix, with_codebook_weight, with_midlayer])
def test_names_of_other_exports_are_understood(pair, rename):
    plain = load_drafter(pair.drafter)
    rename_tensors(pair.drafter, rename)
    assert same_params(load_drafter(pair.drafter), plain)


def test_flat_configs_and_missing_architectures_are_understood(pair):
    plain = load_drafter(pair.drafter)
    config = json.loads((pair.drafter / "config.json").read_text())
    change_config(pair.drafter, drop=("dflash_config", "architectures"), **config["dflash_config"])
    assert same_params(load_drafter(pair.drafter), plain)
    assert read_draft_config(pair.drafter) == plain.config


def test_the_drafter_takes_its_targets_dtype_unless_told_otherwise(tmp_path):
    pair = write_tiny_pair(tmp_path, dtype="bfloat16")
    target = load_target(pair.target, dtype="float32")
    assert load_drafter(pair.drafter).fc.dtype == ml_dtypes.bfloat16
    assert load_drafter(pair.drafter, target).fc.dtype == np.float32
    assert load_drafter(pair.drafter, target, dtype="bfloat16").fc.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"num_layers": 4}, "drafter: num_target_layers is 3 for the drafter and 4 for the"),
        ({"hidden_size": 48}, "drafter: hidden_size is 64 for the drafter and 48 for the target"),
        ({"vocab_size": 300}, "drafter: vocab_size is 307 for the drafter and 300 for the target"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path, pair, target, message):
    other = load_target(write_tiny_pair(tmp_path / "other", num_layers=3).target)
    changes = {"num_layers": "num_layers", "hidden_size": "width", "vocab_size": "vocab"}
    config = other.config
    for name, value in target.items():
        config = replace(config, **{changes[name]: value})
    with pytest.raises(ValueError, match=message):
        load_drafter(pair.drafter, other.replace(config=config))


def test_a_tap_of_the_last_layer_is_loaded(tmp_path):
    """Known fault A05: it reads the residual stream before the final norm."""
    nested = {"target_layer_ids": [0, 2]}
    pair = write_tiny_pair(tmp_path, draft_config={"dflash_config": nested})
    draft = load_drafter(pair.drafter, load_target(pair.target))
    assert draft.config.target_layer_ids == (0, 2)


def test_fc_of_another_number_of_taps_is_refused(pair):
    change_config(
        pair.drafter,
        dflash_config=json.loads((pair.drafter / "config.json").read_text())["dflash_config"]
        | {"target_layer_ids": [1]},
    )
    with pytest.raises(ValueError, match=r"'fc.weight' has shape \[64, 128\], wanted \[64, 64\]"):
        load_drafter(pair.drafter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prefix_gru.weight_ih_l0", "a Domino drafter"),
        ("aux_hidden_norms.0.weight", "a Laguna drafter"),
        ("layers.0.self_attn.attention_sink_bias", r"attention sinks \(MiMo\)"),
        ("encoder.fc.weight", "a Muse-Glimmer drafter"),
        ("mtp.fc.weight", "an MTP head"),
    ],
)
def test_tensors_of_another_family_are_named(pair, name, message):
    write_file(pair.drafter / MODEL, tensors_of(pair.drafter) | {name: np.zeros(3, np.float32)})
    with pytest.raises(NotImplementedError, match=f"{name}' belongs to {message}, which is not"):
        load_drafter(pair.drafter)


def test_a_config_that_contradicts_its_tensors_is_refused(pair):
    change_config(pair.drafter, architectures=["DFlashDraftModel"])
    with pytest.raises(ValueError, match="no place for: 'candidate_selector.hidden_projection"):
        load_drafter(pair.drafter)


def test_a_drafter_that_is_not_there_is_said(tmp_path):
    ours = ", ".join(packaged.packaged_drafters())
    with pytest.raises(FileNotFoundError, match=f"none': no such folder, and the names are {ours}"):
        load_drafter(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=f"'smollm2-eagle': .* the names are {ours}"):
        load_drafter("smollm2-eagle")


def test_a_folder_among_the_assets_is_a_drafter_by_name(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(packaged, "FOLDER", tmp_path / "drafters")
    assert packaged.packaged_drafters() == ()
    shutil.copytree(pair.drafter, tmp_path / "drafters" / "smollm2-eagle")
    (tmp_path / "drafters" / "left-over").mkdir()
    assert packaged.packaged_drafters() == ("smollm2-eagle",)
    assert packaged.our_drafters("smollm2") == ("eagle",)
    assert same_params(load_drafter("smollm2-eagle"), load_drafter(pair.drafter))


def int8_drafter(folder):
    """Store a drafter's fc as int8 by hand, and one codebook by columns."""
    t = tensors_of(folder)
    rng = np.random.default_rng(0)
    fc = rng.integers(-127, 128, t["fc.weight"].shape, dtype=np.int8)
    book = rng.integers(-127, 128, (V, 16), dtype=np.int8)
    scale, columns = rng.random(E, np.float32), rng.random(16, np.float32)
    name = "candidate_selector.predecessor_codebook"
    t |= {"fc.weight": fc, "fc.weight.scale": scale, name: book, f"{name}.column_scale": columns}
    write_file(folder / MODEL, t)
    return fc.astype(np.float32) * scale[:, None], book.astype(np.float32) * columns[None, :]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_int8_tensors_are_dequantised_by_row_or_column(pair, dtype):
    fc, book = int8_drafter(pair.drafter)
    params = load_drafter(pair.drafter, dtype=dtype)
    assert equal(params.fc, fc.astype(dtype))
    assert equal(params.selector.predecessor, book.astype(dtype))


def test_int8_tensors_need_a_scale_of_their_size(pair):
    int8_drafter(pair.drafter)
    change_tensors(pair.drafter, fc__weight__scale=np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"'fc.weight.scale' is float32 \[3\] .* float32 \[64\]"):
        load_drafter(pair.drafter)
    change_tensors(pair.drafter, drop=["fc.weight.scale"])
    with pytest.raises(ValueError, match="'fc.weight' is int8 and has no 'fc.weight.scale'"):
        load_drafter(pair.drafter)
