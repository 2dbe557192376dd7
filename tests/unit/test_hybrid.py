"""Hybrid and MoE targets: configs, loading, sizes, router and rotary, what is refused by name."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import loop, memory
from dflash_jax.config import MoeConfig, RopeConfig, RuleConfig, TargetConfig
from dflash_jax.fixed import ArraySpec
from dflash_jax.gdn_state import GdnLayerState, check_gdn_state, keep_rows
from dflash_jax.layers import apply_rope, rms_norm, rope_angles
from dflash_jax.state import init_buffers
from dflash_jax.targets import gated_delta, moe
from dflash_jax.weights import load_target
from scripts import tiny_hybrid
from scripts.make_tiny import target_config, write_tiny_pair
from tests import kit
from tests.reference.checkpoint import read_tensors

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def config_of(kind, **changes):
    """A tiny target's config.json, flat, with keys replaced or (by ...) removed."""
    config = tiny_hybrid.text_of(target_config(kind, 4, False, "float32")) | changes
    config.pop("text_config", None)
    return {name: value for name, value in config.items() if value is not ...}


# Configs


def test_a_hybrid_config_says_what_each_layer_is():
    config = TargetConfig.from_hf(config_of("qwen3_next"))
    assert config.gdn_layers == (0, 1, 2) and config.num_attention_layers == 1
    assert config.moe_layers == (0, 1, 2, 3) and config.moe == MoeConfig(4, 2, 32, 32, True)
    assert config.has_output_gate and config.has_unit_norms and config.rope.rotated == 0.25
    by_interval = config_of("qwen3_next", layer_types=..., full_attention_interval=2)
    assert TargetConfig.from_hf(by_interval).gdn_layers == (0, 2)


def test_a_moe_config_without_norm_topk_prob_follows_its_family():
    flags = [
        TargetConfig.from_hf(config_of(kind, norm_topk_prob=...)).moe.renormalises
        for kind in ("qwen3_moe", "qwen3_next")
    ]
    assert flags == [False, True]
    dense = TargetConfig.from_hf(config_of("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2))
    assert dense.moe_layers == (3,) and dense.ffn == 96


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_types": ["linear_attention", "mamba"] * 2}, r"layer types \['mamba'\].*full_att"),
        ({"layer_types": ["linear_attention"] * 4}, "without any full_attention layer"),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported, wanted the sig"),
        ({"attention_bias": True}, "attention_bias is not supported in a hybrid"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid', supported: softmax"),
        ({"n_group": 4}, "n_group 4 .*wanted one softmax over all experts"),
    ],
    ids=["pattern", "no_attention", "gate", "bias", "rope", "router", "groups"],
)
def test_a_form_that_is_not_built_is_named_with_what_is(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        TargetConfig.from_hf(config_of("qwen3_next", **changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"linear_num_key_heads": 3}, "4 linear value heads are not a multiple of 3"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is '1', wanted an integer from 2"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5 of 4 experts"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
    ],
    ids=["layers", "heads", "conv", "experts", "rotary"],
)
def test_a_contradiction_is_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_hf(config_of("qwen3_next", **changes))


# Loading and sizes


def test_a_wrapped_checkpoint_loads_its_text_and_says_what_is_left_out(tmp_path, caplog):
    pair = write_tiny_pair(tmp_path, target="qwen3_5", num_layers=2)
    with caplog.at_level(logging.WARNING):
        target = load_target(pair.target)
    assert "1 tensors of others are left out (model.visual.pos_embed.weight" in caplog.text
    stored = read_tensors(pair.target)["model.language_model.layers.0.input_layernorm.weight"]
    np.testing.assert_array_equal(target.layers[0].input_norm, 1 + stored)


def test_norms_of_one_plus_w_keep_their_digits_beside_bf16():
    x = jnp.ones((1, 64), jnp.bfloat16) * 3
    weight = jnp.full((64,), 1 + 2**-10, jnp.float32)
    assert rms_norm(x, weight, 0.0).dtype == jnp.bfloat16
    wide = rms_norm(x.astype(jnp.float32), weight, 0.0)
    np.testing.assert_allclose(wide, 1 + 2**-10, rtol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next", "qwen3_moe"])
def test_the_memory_estimate_counts_hybrid_weights_and_states(tmp_path, kind):
    target = load_target(write_tiny_pair(tmp_path, target=kind, num_layers=2).target)
    fixed = dj.plan(target.config, RuleConfig("none", 0), batch=2, max_context=64, dtype="float32")
    rows = dict(memory.estimate(target.config, RuleConfig("none", 0), fixed))
    assert rows["target weights"] == sum(x.nbytes for x in jax.tree.leaves(target))
    states = jax.eval_shape(lambda: init_buffers(fixed)).gdn
    held = 0 if states is None else sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
    assert rows.get("recurrent states", 0) == held - (0 if states is None else 8)  # but num_kept


# Parts


@pytest.mark.parametrize("position", [1, 300, 70_000])
def test_partial_rotary_turns_the_first_dims_in_halves_and_no_other(position):
    """Known fault A23: the whole head turned, or neighbours paired."""
    rope = RopeConfig(theta=1e7, rotated=0.25)
    cos, sin = rope_angles(jnp.array([position], jnp.int32), rope, 64, 1 << 17)
    got = np.asarray(apply_rope(jnp.ones((1, 1, 64)), cos, sin))[0, 0]
    angle = position * 1e7 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(got[:8], np.cos(angle) - np.sin(angle), atol=2e-4)
    np.testing.assert_allclose(got[8:16], np.cos(angle) + np.sin(angle), atol=2e-4)
    np.testing.assert_array_equal(got[16:], 1.0)


def test_equal_experts_are_chosen_by_lowest_number_and_shares_follow_the_flag():
    router = jnp.zeros((5, 4))
    for renormalises, share in ((True, 0.5), (False, 0.2)):
        config = MoeConfig(5, 2, 8, 0, renormalises)
        shares = moe.expert_shares(jnp.ones((3, 4)), router, config, impl="auto")
        np.testing.assert_allclose(shares, np.tile([share, share, 0, 0, 0], (3, 1)), rtol=1e-6)


# Buffers


def hybrid_fixed():
    target = TargetConfig.from_hf(config_of("qwen3_5"))
    return dj.plan(target, RuleConfig("prompt_lookup", 3), batch=2, max_context=64)


def changed(buffers, **fields):
    first, *rest = buffers.gdn.layers
    layers = (first.replace(**fields), *rest)
    return buffers.replace(gdn=buffers.gdn.replace(layers=layers))


def test_a_state_of_another_dtype_or_slot_count_is_refused():
    fixed = hybrid_fixed()
    buffers = init_buffers(fixed)
    state = buffers.gdn.layers[0].state
    slots = buffers.verify_wy_tables
    check_gdn_state("step", buffers.gdn, slots, fixed)
    for wrong, message in (
        (
            state.astype(jnp.bfloat16),
            r"gdn.layers\[0\].state is bfloat16\[2, 4, 16, 16\], Fixed says",
        ),
        (state[:1], r"gdn.layers\[0\].state is float32\[1, 4, 16, 16\], Fixed says float32\[2, 4"),
    ):
        with pytest.raises(ValueError, match=f"step: buffers.{message}"):
            check_gdn_state("step", changed(buffers, state=wrong).gdn, slots, fixed)
    with pytest.raises(ValueError, match=r"verify_wy_tables is int32\[1\], Fixed says int32\[2\]"):
        check_gdn_state("step", buffers.gdn, slots[:1], fixed)
    with pytest.raises(ValueError, match="Fixed has no Gated-DeltaNet state"):
        check_gdn_state(
            "step", buffers.gdn, slots, dataclasses.replace(fixed, verify_wy_tables=None)
        )


def test_prefill_refuses_a_state_that_is_not_what_fixed_says():
    params = kit.pair("qwen3_5", "dflash", layers="one").params
    fixed = kit.sizes(params, 1)
    state, buffers, scratch = kit.carriers(params, fixed, [kit.Request((1, 2, 3), 4)])
    buffers = changed(buffers, past_g=buffers.gdn.layers[0].past_g.astype(jnp.bfloat16))
    where = jnp.int32(3), jnp.int32(0), jnp.int32(-1)
    tokens = jnp.zeros(32, jnp.int32)
    with pytest.raises(ValueError, match=r"prefill: buffers.gdn.layers\[0\].past_g is bfloat16"):
        loop.prefill.lower(params, tokens, *where, state, buffers, scratch, fixed=fixed)


def test_fixed_describes_the_states_behind_its_table():
    spec = hybrid_fixed().verify_wy_tables
    assert isinstance(spec, ArraySpec) and spec.shape == (2,) and spec.dtype == "int32"
    assert len(spec.layers) == 3 and spec.num_slots == 2
    layer = spec.layers[0]
    assert layer.state == ArraySpec((2, 4, 16, 16), "float32")
    assert layer.conv == ArraySpec((2, 3 + 4, 2 * 32 + 64), "bfloat16")


def test_only_sequences_that_took_part_keep_rows():
    gdn = init_buffers(hybrid_fixed()).gdn.replace(num_kept=jnp.array([3, 2], jnp.int32))
    slots = jnp.array([1, 0], jnp.int32)
    kept = keep_rows(gdn, slots, jnp.array([4, 0], jnp.int32), jnp.array([1, 0], jnp.int32))
    np.testing.assert_array_equal(kept.num_kept, [3, 1])
    none = keep_rows(gdn, jnp.full(2, -1, jnp.int32), jnp.full(2, 4, jnp.int32), slots)
    np.testing.assert_array_equal(none.num_kept, [3, 2])


def test_a_prefill_after_kept_rows_folds_them_first():
    """A conversation that goes on: what a step kept belongs to the text before the next prompt."""
    config = TargetConfig.from_hf(config_of("qwen3_5")).gdn
    rng = np.random.default_rng(2)
    params = gated_delta.GdnParams(
        *(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (
            (config.in_width, 8), (4, config.conv_width), (4,), (4,), (16,), (8, 64)
        ))
    )  # fmt: skip
    x = jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)
    layer = init_buffers(hybrid_fixed()).gdn.layers[0]
    layer = jax.tree.map(lambda a: a[:1].astype(jnp.float32), layer)
    assert isinstance(layer, GdnLayerState)

    @functools.partial(jax.jit, static_argnames="is_prefill")
    def run(part, carried, start, num_rows, kept, *, is_prefill=True):
        slots, *counts = (jnp.full(1, n, jnp.int32) for n in (0, start, num_rows, kept))
        rows = gated_delta.RecurrentRows(slots, *counts, is_prefill)
        return gated_delta.gated_delta_layer(
            params, part, rows, carried, config, eps=1e-6, impl="auto"
        )

    _, carried = run(x[:4], layer, 0, 4, 0)
    whole, at_once = run(x[4:], carried, 4, 4, 0)
    _, carried = run(x[4:], carried, 4, 4, 0, is_prefill=False)
    tail, carried = run(jnp.roll(x[4:], -2, axis=0), carried, 6, 2, 2)  # two of four were kept
    kit.assert_close(tail[:2], whole[2:], "rows", 1e-5)
    kit.assert_close(carried.state, at_once.state, "state", 1e-5)
    np.testing.assert_allclose(carried.conv[:, :3], at_once.conv[:, :3], atol=1e-5)
