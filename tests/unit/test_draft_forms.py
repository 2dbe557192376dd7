"""One drafter, told in the forms of its publishers, is one config."""

import pytest

from dflash_jax.config import DraftConfig, LayerAttention
from dflash_jax.draft_forms import draft_form

BODY = {
    "model_type": "qwen3",
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
ZLAB = BODY | {
    "architectures": ["DFlashDraftModel"],
    "num_target_layers": 6,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 306, "target_layer_ids": [0, 3]},
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": BODY,
    "block_size": 8,
    "mask_token_id": 306,
    "draft_vocab_size": 307,
    "aux_hidden_state_layer_ids": [1, 4],
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {"algorithm": "dflash"},
}


def read(config):
    return DraftConfig.from_hf(config, num_target_layers=6)


def test_speculators_counts_taps_from_one_and_nests_the_layers():
    assert read(SPECULATORS) == read(ZLAB)
    assert read(SPECULATORS).target_layer_ids == (0, 3)


def test_speculators_taps_have_a_default_of_their_own():
    config = SPECULATORS | {"aux_hidden_state_layer_ids": None}
    assert DraftConfig.from_hf(config, num_target_layers=36).target_layer_ids == (1, 17, 32)
    with pytest.raises(ValueError, match="no num_target_layers, and no target was given"):
        DraftConfig.from_hf(config)


def test_speculators_leaves_out_what_hugging_face_fills_in():
    short = SPECULATORS | {"transformer_layer_config": {"num_hidden_layers": 5}, "block_size": 16}
    config = DraftConfig.from_hf(short | {"draft_vocab_size": 32000}, num_target_layers=36)
    assert (config.vocab, config.width, config.ffn, config.head_dim) == (151936, 4096, 22016, 128)
    assert (config.num_heads, config.num_kv_heads, config.draft_vocab) == (32, 32, 32000)
    assert config.attention == (LayerAttention(),) * 5
    assert config.rope.theta == 1e4  # Hugging Face's, where z-lab's reader takes 1e6


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("outer", "inner", "causal"),
    [
        ({}, {}, True),
        ({"sliding_window_non_causal": True}, {}, False),
        # Its own key wins over z-lab's, which its converter leaves inside.
        ({"sliding_window_non_causal": False}, {"is_causal": False}, True),
        ({"sliding_window_non_causal": None}, {"is_causal": False}, False),
    ],
)
def test_speculators_says_causality_of_sliding_layers_alone(outer, inner, causal):
    body = BODY | SLIDING | inner
    config = read(SPECULATORS | {"transformer_layer_config": body} | outer)
    assert config.attention == (LayerAttention(causal, 8), LayerAttention(False, None))


def test_a_reduced_vocabulary_is_the_heads_alone():
    config = read(SPECULATORS | {"draft_vocab_size": 100})
    assert (config.vocab, config.draft_vocab, config.num_draft_ids) == (307, 100, 100)
    assert read(SPECULATORS).draft_vocab is None and read(SPECULATORS).num_draft_ids == 307


SPARK = {"markov_rank": 16, "markov_head_type": "gated", "enable_confidence_head": False}
DEEPSPEC = BODY | {
    "architectures": ["Qwen3DSparkModel"],
    "num_target_layers": 6,
    "block_size": 7,
    "mask_token_id": 306,
    "target_layer_ids": [0, 3],
    **SPARK,
}
NESTED = {"mask_token_id": 306, "target_layer_ids": [0, 3], "projector_type": "dspark", **SPARK}
SPECFORGE = BODY | {
    "architectures": ["DSparkDraftModel"],
    "num_target_layers": 6,
    "block_size": 7,
    "dflash_config": NESTED,
}


@pytest.mark.parametrize(
    ("config", "publisher", "kind", "from_anchor"),
    [
        (ZLAB, "z-lab", "dflash", False),
        (ZLAB | {"architectures": ["DFlash2DraftModel"]}, "z-lab", "dflash2", False),
        (DEEPSPEC, "DeepSpec", "dspark", True),
        (DEEPSPEC | {"markov_rank": 0}, "DeepSpec", "dspark", True),
        (SPECFORGE, "SpecForge", "dspark", True),
        (ZLAB | {"dflash_config": NESTED}, "z-lab", "dspark", True),
        (SPECULATORS, "speculators", "dflash", False),
        (SPECULATORS | {"sample_from_anchor": True}, "speculators", "dspark", True),
        (SPECULATORS | {"speculators_model_type": "dspark"}, "speculators", "dspark", False),
    ],
)
def test_a_form_tells_the_family_and_which_rows_draft(config, publisher, kind, from_anchor):
    form = draft_form(config, 6)
    assert (form.publisher, form.kind) == (publisher, kind)
    assert form.facts["sample_from_anchor"] is from_anchor


def test_dspark_keys_may_be_nested_flat_or_speculators():
    nested = BODY | {"architectures": ["DSparkDraftModel"], "dspark_config": NESTED}
    spec = SPECULATORS | {"speculators_model_type": "dspark", **SPARK}
    for config in (DEEPSPEC, SPECFORGE, nested, spec):
        facts = draft_form(config).facts
        assert {name: facts[name] for name in SPARK} == SPARK
        assert facts["target_layer_ids"] == [0, 3] and facts["mask_token_id"] == 306
    bare = SPECULATORS | {"speculators_model_type": "dspark", "sample_from_anchor": None}
    facts = draft_form(bare).facts
    assert facts["markov_rank"] == 256 and facts["markov_head_type"] == "vanilla"
    assert facts["enable_confidence_head"] and facts["confidence_head_with_markov"]
    assert facts["sample_from_anchor"] is True
    assert "markov_rank" not in draft_form(SPECULATORS).facts


def test_a_projector_that_contradicts_the_architecture_is_refused():
    config = SPECFORGE | {"dflash_config": NESTED | {"projector_type": "dflash"}}
    with pytest.raises(ValueError, match="projector_type is 'dflash', but the architecture is DSp"):
        draft_form(config)


def test_layers_that_are_not_qwen3s_are_refused():
    config = SPECULATORS | {"transformer_layer_config": BODY | {"model_type": "llama"}}
    with pytest.raises(NotImplementedError, match="of model_type 'llama' is not supported"):
        draft_form(config)


def test_what_the_speculators_library_saves_is_what_deepspec_says():
    """Keys and nesting as speculators 0.9.0 (transformers 5.24) wrote them."""
    body = {k: v for k, v in BODY.items() if k != "rope_theta"} | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 4096,
        "max_window_layers": 28,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "use_sliding_window": False,
    }
    saved = {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [1, 4],
        "block_size": 7,
        "confidence_head_with_markov": True,
        "draft_vocab_size": 307,
        "dtype": "float32",
        "enable_confidence_head": False,
        "markov_head_type": "gated",
        "markov_rank": 16,
        "mask_token_id": 306,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dspark", "default_proposal_method": "greedy"},
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
        "transformers_version": "5.24.0",
    }
    assert read(saved) == read(DEEPSPEC | {"max_position_embeddings": 4096})
