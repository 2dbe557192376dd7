"""The dense forwards of training against the inference step, and their masks."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.engine import generate
from dflash_jax.export import write_drafter
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.params import LayerParams, Params, TargetParams
from dflash_jax.train.dense import causal_attention, draft_hidden, target_forward
from dflash_jax.train.evaluate import accepted_counts, walk
from dflash_jax.train.initial import drafter_config, head_config
from dflash_jax.train.kinds import Seen, Trainable, drafts_of
from dflash_jax.weights import load_drafter
from tests.drawn import drawn_tensors

VOCAB, TAPS = 300, (-1, 0, 1)


@cache
def tiny_target() -> TargetParams:
    config = TargetConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": VOCAB,
            "rope_theta": 10000.0,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
        }
    )
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32)

    layers = tuple(
        LayerParams(
            input_norm=jnp.ones(64),
            qkv=normal(128, 64),
            o=normal(64, 64),
            post_norm=jnp.ones(64),
            gate_up=normal(192, 64),
            down=normal(64, 96),
        )
        for _ in range(3)
    )
    return TargetParams(
        embed=normal(VOCAB, 64), layers=layers, norm=jnp.ones(64), head=None, config=config
    )


def tiny_drafter(kind: str, target: TargetParams) -> tuple[Trainable, dict[str, jax.Array]]:
    """A drafter whose every tensor is random, so that nothing is hidden behind an identity."""
    if kind == "mtp":
        config = MtpConfig.from_hf(head_config(target.config, num_drafts=4, ffn=48))
        return config, drawn_tensors(config, target, noise=0.2)
    config = DraftConfig.from_hf(
        drafter_config(
            kind, target.config, taps=TAPS, mask_id=4, num_layers=2, ffn=48, selector_rank=8
        )
    )
    return config, drawn_tensors(config, target, noise=0.2)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "mtp"])
def test_training_drafts_are_the_drafts_of_the_real_loop(kind, tmp_path):
    target = tiny_target()
    config, tensors = tiny_drafter(kind, target)
    write_drafter(tmp_path, config, tensors)
    pair = Params(target=target, draft=load_drafter(tmp_path, target))
    prompt = [int(i) for i in np.random.default_rng(3).integers(20, VOCAB, 19)]
    made = generate(pair, [prompt], max_new_tokens=24, page_size=16, eos_ids=[])[0]
    text = prompt + list(made.ids)
    tokens = jnp.asarray([text + [0] * (64 - len(text))], jnp.int32)

    at = len(prompt) + np.concatenate([[0], np.cumsum(made.stats.committed[0])[:-1]])
    anchors = jnp.asarray(at[None], jnp.int32)

    @jax.jit
    def draft(tokens):
        seen = Seen(tokens, *target_forward(target, tokens, TAPS, causal_attention("xla")))
        return drafts_of(tensors, config, target, seen, anchors, chunk=64)

    drafts = np.asarray(draft(tokens))[0]  # [cycles, R-1]
    loop_drafts = made.stats.drafted[0]
    whole = (loop_drafts >= 0).all(axis=1)  # the last blocks are cut by the budget
    assert whole.sum() > 10
    np.testing.assert_array_equal(drafts[whole], loop_drafts[whole])

    if not kind.startswith("dflash"):
        return  # the walk below takes its drafts from what was compared above
    counts = accepted_counts(
        target, {kind: tensors}, tokens, configs=((kind, config),), num_anchors=16,
        attention="xla", chunk=64,
    )  # fmt: skip
    cycles = walk(np.asarray(counts[kind])[0], len(prompt), len(text) - 1)
    known = int(whole.sum())
    assert cycles[:known] == made.stats.committed[0][:known].tolist()


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_block_never_sees_features_from_its_anchor_on(kind):
    target = tiny_target()
    config, tensors = tiny_drafter(kind, target)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(20, VOCAB, (2, 32)), jnp.int32)
    features = jnp.asarray(rng.normal(size=(2, 32, 3 * 64)), jnp.float32)
    anchors = jnp.asarray([[5, 20], [0, 31]], jnp.int32)
    later = jnp.arange(32)[None, :, None] >= anchors[:, :1, None]
    changed = jnp.where(later, 7.0, features)
    run = jax.jit(lambda f, t: draft_hidden(tensors, config, target.embed, f, t, anchors))
    before, after = run(features, tokens), run(changed, tokens)
    np.testing.assert_array_equal(before[:, 0], after[:, 0])
    assert float(jnp.abs(before[0, 1] - after[0, 1]).max()) > 1e-3  # the later block does see them

    other = tokens.at[0, 6:20].set(9)  # tokens after an anchor are masks to the drafter
    np.testing.assert_array_equal(run(features, tokens)[0], run(features, other)[0])


def test_blocks_of_one_sequence_do_not_see_each_other():
    target = tiny_target()
    config, tensors = tiny_drafter("dflash2", target)
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(20, VOCAB, (1, 32)), jnp.int32)
    features = jnp.asarray(rng.normal(size=(1, 32, 3 * 64)), jnp.float32)

    @jax.jit
    def run(anchors):
        return draft_hidden(tensors, config, target.embed, features, tokens, anchors)[0, 0]

    alone, beside = run(jnp.asarray([[9, 0, 31]])), run(jnp.asarray([[9, 10, 3]]))
    np.testing.assert_array_equal(alone, beside)


def test_target_forward_taps_layer_outputs():
    target = tiny_target()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (1, 8)), jnp.int32)
    attend = causal_attention("xla")
    run = jax.jit(
        lambda params, taps: target_forward(params, tokens, taps, attend), static_argnums=1
    )
    features, _ = run(target, (-1, 1))
    np.testing.assert_array_equal(features[0, :, :64], target.embed[tokens[0]])
    short = dataclasses.replace(target.config, num_layers=2)
    cut = target.replace(layers=target.layers[:2], config=short)
    _, hidden = run(cut, (0,))
    tapped = features[0, :, 64:]
    normed = tapped / jnp.sqrt(jnp.mean(tapped**2, -1, keepdims=True) + target.config.rms_eps)
    np.testing.assert_allclose(hidden[0], normed, atol=1e-5)
