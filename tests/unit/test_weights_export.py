import json
import os
from dataclasses import replace

import jax
import numpy as np
import pytest

from dflash_jax.config import DraftConfig, LayerAttention, RopeConfig
from dflash_jax.export import drafter_tensors, drafter_to_hf, save_drafter
from dflash_jax.safetensors_io import read_file
from dflash_jax.weights import load_drafter
from scripts.make_tiny import write_tiny_pair


@pytest.fixture
def params(tmp_path):
    return load_drafter(write_tiny_pair(tmp_path / "pair").drafter)


def leaves(params):
    return [np.asarray(x) for x in jax.tree.leaves(params)]


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_drafter_comes_back_bit_for_bit(tmp_path, kind, dtype):
    pair = write_tiny_pair(tmp_path / "pair", drafter=kind, dtype=dtype)
    params = load_drafter(pair.drafter)
    save_drafter(params, tmp_path / "saved")
    back = load_drafter(tmp_path / "saved")
    assert back.config == params.config
    for a, b in zip(leaves(params), leaves(back), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)
    assert sorted(os.listdir(tmp_path / "saved")) == ["config.json", "model.safetensors"]
    original, saved = (
        read_file(f / "model.safetensors") for f in (pair.drafter, tmp_path / "saved")
    )
    assert set(original) == set(saved)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == dtype


def test_int8_is_within_half_a_step_of_every_channel(tmp_path, params):
    save_drafter(params, tmp_path / "saved", int8=True)
    stored = read_file(tmp_path / "saved" / "model.safetensors")
    back = drafter_tensors(load_drafter(tmp_path / "saved", dtype="float32"))
    for name, x in drafter_tensors(params).items():
        if x.ndim != 2:
            assert np.array_equal(back[name], x), name
            continue
        axis = 0 if name.endswith("_codebook") else 1
        assert stored[name].dtype == np.int8
        step = np.abs(x).max(axis=axis, keepdims=True) / 127
        # A hair above one half: the scale itself is rounded to f32.
        assert (np.abs(back[name] - x) <= 0.5001 * step).all(), name
    scales = {name.rsplit(".", 1)[1] for name in stored if "scale" in name}
    assert scales == {"scale", "column_scale"}


def test_a_zero_row_stays_zero_in_int8(tmp_path, params):
    zeroed = params.replace(fc=params.fc.at[3].set(0.0))
    save_drafter(zeroed, tmp_path / "saved", int8=True)
    fc = np.asarray(load_drafter(tmp_path / "saved").fc)
    assert np.isfinite(fc).all() and not fc[3].any()


FULL, CAUSAL = LayerAttention(False, None), LayerAttention(True, None)
WINDOW, CAUSAL_WINDOW = LayerAttention(False, 32), LayerAttention(True, 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": (FULL, FULL)},
        {"attention": (CAUSAL, CAUSAL)},
        {"attention": (WINDOW, FULL)},
        {"attention": (WINDOW, WINDOW)},
        {"attention": (CAUSAL_WINDOW, FULL)},
        {"attention": (CAUSAL, FULL)},
        {"attention": (CAUSAL_WINDOW, CAUSAL)},
        {"soft_cap": 20.0, "output_multiplier": 0.25, "input_embedding_scale": 1.5},
        {"rope": RopeConfig("yarn", 1e6, 4.0, 16, attention_factor=1.25)},
        {"rope": RopeConfig("llama3", 5e5, 8.0, 8192)},
        {"rope": RopeConfig("linear", 1e4, 2.0, 4096)},
        {"has_attention_bias": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_setting_of_a_drafter_survives_its_config_file(params, changes):
    config = replace(params.config, **changes)
    hf = json.loads(json.dumps(drafter_to_hf(config)))
    assert DraftConfig.from_hf(hf) == config


@pytest.mark.parametrize(
    "attention",
    [(WINDOW, LayerAttention(False, 16)), (CAUSAL, WINDOW), (FULL, CAUSAL_WINDOW, WINDOW)],
)
def test_attention_that_the_keys_cannot_say_is_refused_before_writing(tmp_path, params, attention):
    config = replace(params.config, attention=attention, num_layers=len(attention))
    with pytest.raises(ValueError, match="z-lab's keys cannot say"):
        save_drafter(params.replace(config=config), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_biases_are_written_apart_and_come_back(tmp_path, params):
    rng = np.random.default_rng(0)

    def biased(layer):
        qkv = rng.standard_normal(layer.qkv.shape[0]).astype(np.float32)
        o = rng.standard_normal(layer.o.shape[0]).astype(np.float32)
        return layer.replace(qkv_bias=qkv, o_bias=o)

    layers = tuple(biased(layer) for layer in params.layers)
    config = replace(params.config, has_attention_bias=True)
    save_drafter(params.replace(layers=layers, config=config), tmp_path / "saved")
    back = load_drafter(tmp_path / "saved")
    assert np.array_equal(back.layers[1].qkv_bias, layers[1].qkv_bias)
    assert np.array_equal(back.layers[0].o_bias, layers[0].o_bias)
    keys = [np.asarray(layer.qkv_bias)[64:] for layer in layers]
    assert np.array_equal(back.fused_kv_bias, np.concatenate(keys))
