"""Configs: every spelling of a checkpoint is settled here, and what is not built is named."""

import copy
import dataclasses

import pytest

from dflash_jax.config import DraftConfig, LayerAttention, RopeConfig, TargetConfig, default_taps
from tests.reference import dflash as reference

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LLAMA = {k: v for k, v in QWEN3.items() if k not in ("head_dim", "num_key_value_heads")} | {
    "model_type": "llama",
    "tie_word_embeddings": False,
}
DRAFT = {
    "architectures": ["DFlash2DraftModel"],
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_target_layers": 6,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 306,
        "target_layer_ids": [0, 3],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 16,
    },
}


def changed(config, **changes):
    """A copy with keys replaced; those of `dflash_config` merged, those set to ... removed."""
    config = copy.deepcopy(config)
    config.setdefault("dflash_config", {}).update(changes.pop("dflash_config", {}))
    config |= changes
    return {name: value for name, value in config.items() if value is not ...}


# Targets


def test_a_target_is_read_as_its_config_says():
    config = TargetConfig.from_hf(QWEN3)
    assert (config.vocab, config.width, config.ffn, config.num_layers) == (307, 64, 96, 6)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert config.is_tied and config.has_qk_norm and not config.has_attention_bias
    assert config.rope == RopeConfig(theta=1e6)
    assert config.real_vocab == 307 and config.max_context == 4096


def test_a_llama_config_gets_its_own_defaults():
    config = TargetConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert not config.has_qk_norm and not config.is_tied
    assert config.rope == RopeConfig(theta=1e4)
    assert TargetConfig.from_hf(LLAMA | {"attention_bias": True}).has_attention_bias


def test_a_nested_config_is_the_flat_one():
    inner = {k: v for k, v in QWEN3.items() if k != "tie_word_embeddings"}
    outer = {"model_type": "some_vision_model", "text_config": inner, "tie_word_embeddings": True}
    assert TargetConfig.from_hf(outer) == TargetConfig.from_hf(QWEN3)


def test_both_spellings_of_rope_are_one():
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024}
    old = RopeConfig.from_hf(
        {"rope_theta": 5e5, "rope_scaling": scaling}, default_theta=1.0, who=""
    )
    new = {"rope_parameters": scaling | {"rope_theta": 5e5}}
    older = {"rope_theta": 5e5, "rope_scaling": {**scaling, "type": "llama3"}}
    del older["rope_scaling"]["rope_type"]
    assert old == RopeConfig.from_hf(new, default_theta=1.0, who="")
    assert old == RopeConfig.from_hf(older, default_theta=1.0, who="")
    assert (old.kind, old.theta, old.factor, old.original_context) == ("llama3", 5e5, 8.0, 1024)


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({}, 0.1 * 3.4657359027997265 + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.6931471805599454 / 1.3465735902799727),
    ],
    ids=str,
)
def test_yarn_scales_the_angles_as_hugging_face_does(scaling, wanted):
    raw = {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, **scaling}}
    rope = RopeConfig.from_hf(raw | {"max_position_embeddings": 512}, default_theta=1e4, who="")
    assert rope.attention_factor == pytest.approx(wanted)
    assert rope.original_context == 512


REFUSED_TARGETS = [
    ({"model_type": "mamba"}, NotImplementedError, "model_type 'mamba' is not supported, wanted"),
    ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act 'gelu', supported: silu"),
    ({"mlp_bias": True}, NotImplementedError, "mlp_bias is not supported"),
    (
        {"layer_types": ["full_attention", "linear_attention"]},
        NotImplementedError,
        r"layer types \['linear_attention'\] are not supported, wanted full_attention",
    ),
    (
        {"use_sliding_window": True, "sliding_window": 128},
        NotImplementedError,
        "a sliding window in the target is not supported",
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        NotImplementedError,
        "rope type 'longrope' is not supported, wanted one of default, linear, llama3, yarn",
    ),
    ({"rope_scaling": {"type": "linear"}}, ValueError, "rope type 'linear' has no factor"),
    ({"partial_rotary_factor": 0.25}, NotImplementedError, "partial_rotary_factor below 1"),
    ({"num_key_value_heads": 3}, ValueError, "4 query heads are not a multiple of 3 kv heads"),
    ({"hidden_size": ...}, ValueError, "no hidden_size"),
    ({"hidden_size": "abc"}, ValueError, "hidden_size is 'abc', wanted an integer from 1"),
    ({"hidden_size": [64]}, ValueError, "hidden_size is .* wanted an integer from 1"),
    ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers is '0', wanted an integer from 1"),
    ({"num_hidden_layers": 2.5}, ValueError, "num_hidden_layers is '2.5'"),
    ({"num_hidden_layers": float("inf")}, ValueError, "num_hidden_layers is 'inf'"),
    ({"num_attention_heads": 0}, ValueError, "num_attention_heads is '0'"),
    ({"vocab_size": True}, ValueError, "vocab_size is 'True'"),
    ({"max_position_embeddings": "x"}, ValueError, "max_position_embeddings is 'x'"),
    ({"rms_norm_eps": "x"}, ValueError, "rms_norm_eps is 'x', wanted a number"),
    ({"tie_word_embeddings": "false"}, ValueError, "tie_word_embeddings is 'false', wanted true"),
    ({"rope_theta": 0}, ValueError, "rope_theta is '0', wanted a number above 1"),
    ({"rope_scaling": "linear"}, ValueError, "rope_scaling is 'linear', wanted an object"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, ValueError, "factor is '0'"),
    ({"rope_scaling": {"type": "linear", "factor": "x"}}, ValueError, "factor is 'x'"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        ValueError,
        "original_max_position_embeddings is '0'",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
        NotImplementedError,
        "rope parameters by layer type .full_attention. are not supported",
    ),
    ({"text_config": 3}, ValueError, "text_config is '3', wanted an object"),
    ({"layer_types": 5}, ValueError, "layer_types is '5', wanted a list of texts"),
    ({"layer_types": [["x"]]}, ValueError, "layer_types is .* wanted a list of texts"),
]


def test_null_counts_as_absent():
    absent = dict.fromkeys(
        ("text_config", "rope_scaling", "layer_types", "rope_parameters", "partial_rotary_factor")
    )
    assert TargetConfig.from_hf(QWEN3 | absent) == TargetConfig.from_hf(QWEN3)


@pytest.mark.parametrize(
    ("changes", "error", "message"), REFUSED_TARGETS, ids=[str(c[0]) for c in REFUSED_TARGETS]
)
def test_a_target_that_is_not_built_is_named(changes, error, message):
    with pytest.raises(error, match=message) as caught:
        TargetConfig.from_hf(changed(QWEN3, **changes))
    assert str(caught.value).startswith("target config")


# Drafters


def test_a_drafter_is_read_as_its_config_says():
    config = DraftConfig.from_hf(DRAFT)
    assert (config.kind, config.block_rows, config.max_drafts) == ("dflash2", 8, 7)
    assert (config.mask_id, config.target_layer_ids) == (306, (0, 3))
    assert (config.conv_taps, config.conv_group, config.num_conv_groups) == (2, 16, 4)
    assert (config.selector_rank, config.selector_top_k) == (8, 16)
    assert config.attention == (LayerAttention(), LayerAttention())
    assert config.backbone is config


def test_flat_and_nested_keys_are_one_and_nested_ones_win():
    nested = DRAFT["dflash_config"]
    flat = {k: v for k, v in DRAFT.items() if k != "dflash_config"} | nested
    assert DraftConfig.from_hf(flat) == DraftConfig.from_hf(DRAFT)
    assert DraftConfig.from_hf(changed(DRAFT, block_size=4)).block_rows == 8


def test_a_dflash_drafter_has_neither_convolution_nor_selector():
    config = DraftConfig.from_hf(changed(DRAFT, architectures=["DFlashDraftModel"]))
    assert config.kind == "dflash"
    assert config.conv_taps == config.conv_group == config.num_conv_groups == 0
    assert config.selector_rank == config.selector_top_k == 0


@pytest.mark.parametrize(
    ("layers", "drafts", "wanted"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (32, 5, (1, 8, 15, 22, 29)),
        (30, 1, (15,)),
    ],
)
def test_taps_without_a_config_are_the_published_ones(layers, drafts, wanted):
    assert default_taps(layers, drafts) == wanted
    attention = {"num_hidden_layers": drafts, "num_target_layers": ...}
    raw = changed(DRAFT, dflash_config={"target_layer_ids": None}, **attention)
    assert DraftConfig.from_hf(raw, num_target_layers=layers).target_layer_ids == wanted


def test_head_transforms_are_read_and_multiplied():
    more = {"output_multiplier": 0.5, "final_logit_softcapping": 30.0, "input_embedding_scale": 8.0}
    config = DraftConfig.from_hf(changed(DRAFT, dflash_config=more, logit_scale=0.25))
    assert config.output_multiplier == 0.125
    assert config.soft_cap == 30.0
    assert config.input_embedding_scale == 8.0
    none = DraftConfig.from_hf(changed(DRAFT, final_logit_softcapping=0.0))
    assert none.soft_cap is None and none.output_multiplier == 1.0


SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = {"layer_types": [SLIDING, FULL]}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
ATTENTION = {
    "nothing said": ({}, [(False, None)] * 2),
    "sliding, hence causal": (MIXED | WINDOW, [(True, 8), (False, None)]),
    "not causal at top level": (MIXED | WINDOW | {"is_causal": False}, [(False, 8), (False, None)]),
    "causal at top level": (MIXED | WINDOW | {"is_causal": True}, [(True, 8), (True, None)]),
    "not causal below": (
        MIXED | WINDOW | {"dflash_config": {"causal": False}},
        [(False, 8), (False, None)],
    ),
    "top level before below": (
        MIXED | WINDOW | {"is_causal": False, "dflash_config": {"causal": True}},
        [(False, 8), (False, None)],
    ),
    # Hugging Face drops the window unless it is switched on; the layer stays causal.
    "a window that is switched off": (
        MIXED | {"sliding_window": 8},
        [(True, None), (False, None)],
    ),
    "a window for every layer": (
        {"dflash_config": {"use_swa": True, "swa_window_size": 5, "causal": False}},
        [(False, 5)] * 2,
    ),
    "a window below": (
        MIXED | {"dflash_config": {"swa_window_size": 6}},
        [(True, 6), (False, None)],
    ),
    "layers from the second on": (
        WINDOW | {"max_window_layers": 1},
        [(False, None), (True, 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_window_and_causality_of_each_layer_are_settled_by_priority(name):
    changes, wanted = ATTENTION[name]
    raw = changed(DRAFT, **copy.deepcopy(changes))
    got = [(layer.is_causal, layer.window) for layer in DraftConfig.from_hf(raw).attention]
    assert got == wanted
    nested = raw["dflash_config"]
    theirs = zip(
        reference.layer_causality(raw, nested), reference.layer_windows(raw, nested), strict=True
    )
    assert got == list(theirs)


REFUSED_DRAFTERS = [
    ({"architectures": ["DominoDraftModel"]}, NotImplementedError, "architecture 'DominoDraft"),
    ({"architectures": ...}, NotImplementedError, "architecture 'none given' is not supported"),
    (
        {"speculators_model_type": "eagle3"},
        NotImplementedError,
        "speculators_model_type 'eagle3' is not supported, wanted one of dflash, dspark",
    ),
    (
        {"dflash_config": {"projector_type": "domino"}},
        NotImplementedError,
        "projector_type 'domino'",
    ),
    ({"draft_vocab_size": 308}, ValueError, "draft_vocab_size 308 is above the vocab_size of 307"),
    ({"attention_sink_bias": True}, NotImplementedError, "attention_sink_bias is not supported"),
    ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act 'gelu', supported: silu"),
    (
        {"layer_types": ["chunked_attention", FULL]},
        NotImplementedError,
        r"layer types \['chunked_attention'\] are not supported",
    ),
    ({"layer_types": [FULL]}, ValueError, "1 layer_types for 2 layers"),
    ({"num_key_value_heads": 3}, ValueError, "4 query heads are not a multiple of 3 kv heads"),
    ({"num_target_layers": ...}, ValueError, "no num_target_layers, and no target was given"),
    (
        {"num_target_layers": 10**9},
        ValueError,
        "num_target_layers is 1000000000, wanted at most",
    ),
    ({"num_hidden_layers": 10**30}, ValueError, "num_hidden_layers is 1000.*, wanted at most 4096"),
    ({"rope_scaling": {"type": "su", "factor": 2}}, NotImplementedError, "rope type 'su'"),
    ({"head_dim": ...}, ValueError, "no head_dim"),
    ({"dflash_config": {"mask_token_id": None}}, ValueError, "no mask_token_id, in dflash_config"),
    (
        {"dflash_config": {"mask_token_id": 307}},
        ValueError,
        "mask_token_id 307 is outside the vocabulary of 307",
    ),
    ({"dflash_config": {"block_size": 1}}, ValueError, "block_size 1, wanted at least 2"),
    (
        {"dflash_config": {"target_layer_ids": [3, 0]}},
        ValueError,
        r"target_layer_ids \[3, 0\] are not strictly increasing",
    ),
    (
        {"dflash_config": {"target_layer_ids": [0, 6]}},
        ValueError,
        r"target_layer_ids \[0, 6\] leave the target's layers, -1..5",
    ),
    ({"dflash_config": {"target_layer_ids": 5}}, ValueError, "target_layer_ids is '5', wanted a"),
    ({"dflash_config": {"target_layer_ids": ["a"]}}, ValueError, "wanted a list of integers"),
    ({"dflash_config": {"mask_token_id": "x"}}, ValueError, "mask_token_id is 'x', wanted an int"),
    ({"dflash_config": {"block_size": "x"}}, ValueError, "block_size is 'x', wanted an integer"),
    ({"architectures": [["x"]]}, ValueError, "architectures is .* wanted a list of texts"),
    (
        {"use_sliding_window": True, "sliding_window": -3},
        ValueError,
        "sliding_window is '-3', wanted an integer from 0",
    ),
    ({"dflash_config": {"selector_top_k": 17}}, ValueError, "selector_top_k 17, supported: 1 to"),
    ({"dflash_config": {"conv_kernel_size": 5}}, ValueError, "conv_kernel_size 5, supported: 1"),
    ({"dflash_config": {"conv_group_size": 24}}, ValueError, "conv_group_size 24 does not divide"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"), REFUSED_DRAFTERS, ids=[str(c[0]) for c in REFUSED_DRAFTERS]
)
def test_a_drafter_that_is_not_built_or_contradicts_itself_is_named(changes, error, message):
    with pytest.raises(error, match=message) as caught:
        DraftConfig.from_hf(changed(DRAFT, **copy.deepcopy(changes)))
    assert str(caught.value).startswith("drafter config")


@pytest.mark.parametrize("config", [TargetConfig.from_hf(QWEN3), DraftConfig.from_hf(DRAFT)])
def test_configs_are_frozen_hashable_and_equal_by_value(config):
    again = dataclasses.replace(config)
    assert again == config and hash(again) == hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab = 5
