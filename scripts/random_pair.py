"""Pairs of a target and a drafter in published shapes, without their weights.

As shapes alone (`params_specs`), for a compile; or with random weights made on the device
(`materialise`), for a benchmark: a cycle costs the same whatever the numbers are.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, GdnConfig, RuleConfig, TargetConfig
from dflash_jax.mtp_config import DrafterConfig, MtpConfig
from dflash_jax.params import (
    ConfidenceParams,
    ConvParams,
    DraftParams,
    GdnParams,
    LayerParams,
    MarkovParams,
    MtpParams,
    Params,
    RuleParams,
    SelectorParams,
    TargetParams,
)
from dflash_jax.weight_layout import laid_out

WEIGHT_SCALE = 0.02

_TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    # Feed-forward and head counts of the 4B as publicly described; the others as published.
    "qwen3.5-4b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "qwen3.8-27b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "tie_word_embeddings": False,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "tiny-hybrid": {
        "model_type": "qwen3_5_text",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
        "tie_word_embeddings": False,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4096,
        "tie_word_embeddings": False,
    },
}
# What a drafter has instead of its target's sizes; the small pair is the one that we ship.
_DRAFTERS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"num_hidden_layers": 3, "intermediate_size": 704},
    "qwen3.5-4b": {
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3.8-27b": {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "tiny": {"num_hidden_layers": 2},
    "tiny-hybrid": {"num_hidden_layers": 2},
}
_RANKS = {"smollm2-135m": 16}  # of DFlash2's selector and of DSpark's Markov head
_MOST_ROWS = {"dspark": 8, "mtp": 4}  # the anchor and 7 drafts, as published, and a head's default
SHAPES = tuple(_TARGETS)
DRAFTERS = ("dflash", "dflash2", "dspark", "mtp", "none")


def pair_configs(
    shapes: str, drafter: str, *, rows: int = 16
) -> tuple[TargetConfig, DrafterConfig]:
    """Configs of a target of `shapes` and of a drafter of its widths.

    Args:
      shapes: one of SHAPES.
      drafter: one of DRAFTERS; "none" is plain decoding by a step of one row.
      rows: of a verification, the anchor included; at most 8 with dspark and 4 with mtp.
    """
    facts = _TARGETS[shapes] | {
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
    }
    target = TargetConfig.from_hf({"model_type": "qwen3"} | facts)
    if drafter == "none":
        return target, RuleConfig("none", 0)
    rows = min(rows, _MOST_ROWS.get(drafter, rows))
    if drafter == "mtp":
        own = {"mtp_num_hidden_layers": 1, "num_speculative_tokens": rows - 1}
        return target, MtpConfig.from_hf({"model_type": "qwen3"} | facts | own)
    extra: dict[str, Any] = {"mask_token_id": target.vocab - 267}
    if drafter == "dflash2":
        extra |= {"conv_kernel_size": 2, "conv_group_size": 16}
        extra |= {"selector_rank": _RANKS.get(shapes, 256), "selector_top_k": 16}
    if drafter == "dspark":
        rows -= 1  # the anchor's row drafts as well
        extra |= {"markov_rank": _RANKS.get(shapes, 256), "markov_head_type": "vanilla"}
        extra |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    names = {
        "dflash": "DFlashDraftModel",
        "dflash2": "DFlash2DraftModel",
        "dspark": "DSparkDraftModel",
    }
    of_draft = {
        "architectures": [names[drafter]],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_target_layers": target.num_layers,
        "block_size": rows,
        "dflash_config": extra,
    } | _DRAFTERS.get(shapes, {})
    return target, DraftConfig.from_hf(facts | of_draft)


def params_specs(target: TargetConfig, draft: DrafterConfig, dtype: str = "bfloat16") -> Params:
    """Params whose leaves are ShapeDtypeStructs."""
    spec = partial(_spec, dtype=dtype)
    target_params = TargetParams(
        embed=spec(target.vocab, target.width),
        layers=tuple(_target_layer(target, i, spec) for i in range(target.num_layers)),
        norm=_norm_of(target, spec)(target.width),
        head=None if target.is_tied else spec(target.vocab, target.width),
        config=target,
    )
    if isinstance(draft, RuleConfig):
        return Params(target_params, RuleParams(None, None, None, draft))
    if isinstance(draft, MtpConfig):
        return Params(target_params, _mtp(draft, spec))
    kv = 2 * draft.num_kv_heads * draft.head_dim
    selector, markov, confidence = None, None, None
    if draft.markov_rank:
        codebook = spec(draft.num_draft_ids, draft.markov_rank)
        markov = MarkovParams(codebook, codebook)
    if draft.has_confidence:
        read = draft.width + draft.confidence_reads_markov * draft.markov_rank
        confidence = ConfidenceParams(spec(1, read), spec(1))
    if draft.selector_rank:
        codebook = spec(draft.vocab, draft.selector_rank)
        selector = SelectorParams(spec(draft.selector_rank, draft.width), codebook, codebook)
    draft_params = DraftParams(
        fc=spec(draft.width, len(draft.target_layer_ids) * target.width),
        hidden_norm=spec(draft.width),
        fused_kv=spec(draft.num_layers * kv, draft.width),
        fused_kv_bias=None,
        layers=tuple(_layer(draft, spec) for _ in range(draft.num_layers)),
        norm=spec(draft.width),
        selector=selector,
        config=draft,
        markov=markov,
        confidence=confidence,
    )
    return Params(target_params, draft_params)


def _mtp(head: MtpConfig, spec: Any) -> MtpParams:
    c = head.layer
    norm = _norm_of(c, spec)
    return MtpParams(
        fc=spec(c.width, 2 * c.width),
        embed_norm=norm(c.width),
        hidden_norm=norm(c.width),
        layer=_target_layer(c, 0, spec),
        kv=spec(2 * c.num_kv_heads * c.head_dim, c.width),
        kv_bias=None,
        norm=norm(c.width),
        config=head,
    )


def _spec(*shape: int, dtype: str) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _layer(config: TargetConfig | DraftConfig, spec: Any) -> LayerParams:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    has_qk_norm = isinstance(config, DraftConfig) or config.has_qk_norm
    conv = None
    if isinstance(config, DraftConfig) and config.conv_taps:
        conv = ConvParams(
            base=spec(2, config.conv_taps, config.width),
            projection=spec(2 * config.conv_taps * config.num_conv_groups, config.width),
        )
    return LayerParams(
        input_norm=spec(config.width),
        qkv=spec(q + 2 * kv, config.width),
        o=spec(config.width, q),
        post_norm=spec(config.width),
        gate_up=spec(2 * config.ffn, config.width),
        down=spec(config.width, config.ffn),
        q_norm=spec(config.head_dim) if has_qk_norm else None,
        k_norm=spec(config.head_dim) if has_qk_norm else None,
        attention_conv=conv,
        mlp_conv=conv,
    )


def _norm_of(target: TargetConfig, spec: Any) -> Any:
    """Norms of `1 + w` are f32, whatever the other weights are."""
    return partial(_spec, dtype="float32") if target.has_unit_norms else spec


def _target_layer(target: TargetConfig, i: int, spec: Any) -> LayerParams:
    """One layer of a dense target, or of a hybrid one without experts."""
    layer = _layer(target, spec)
    if not target.has_output_gate:
        return layer
    norm = _norm_of(target, spec)
    layer = layer.replace(input_norm=norm(target.width), post_norm=norm(target.width))
    if i in target.gdn_layers and target.gdn is not None:
        gdn = _gdn(target.gdn, target.width, spec)
        return layer.replace(qkv=None, o=None, q_norm=None, k_norm=None, gdn=gdn)
    rows = 2 * (target.num_heads + target.num_kv_heads) * target.head_dim
    return layer.replace(
        qkv=spec(rows, target.width),
        q_norm=norm(target.head_dim),
        k_norm=norm(target.head_dim),
    )


def _gdn(c: GdnConfig, width: int, spec: Any) -> GdnParams:
    return GdnParams(
        in_proj=spec(c.in_width, width),
        conv=spec(c.conv_taps, c.conv_width),
        a_log=_spec(c.num_value_heads, dtype="float32"),
        dt_bias=_spec(c.num_value_heads, dtype="float32"),
        norm=spec(c.value_dim),
        out=spec(width, c.value_width),
    )


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(
    key: jax.Array, mean: float, scale: float, *, shape: tuple[int, ...], dtype: str
) -> jax.Array:
    noise = jax.random.normal(key, shape, jnp.dtype(dtype))
    return (mean + scale * noise).astype(dtype)


def materialise(specs: Any, *, scale: float = WEIGHT_SCALE, seed: int = 0) -> Any:
    """Random arrays on the default device for a pytree of ShapeDtypeStructs.

    Vectors are norm weights, so they vary around 1; everything else around 0.
    """
    leaves, tree = jax.tree.flatten(specs)
    # Counter-based keys would cost more than the weights; nothing here needs their quality.
    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), len(leaves))
    arrays = []
    for key, leaf in zip(keys, leaves, strict=True):
        mean = 1.0 if len(leaf.shape) == 1 else 0.0
        arrays.append(_normal(key, mean, scale, shape=leaf.shape, dtype=leaf.dtype.name))
    return jax.tree.unflatten(tree, arrays)


def random_params(
    target: TargetConfig, draft: DrafterConfig, *, dtype: str = "bfloat16", impl: str = "auto"
) -> Params:
    """Random weights of a pair, laid out as a decode by `impl` on this device takes them."""
    specs = params_specs(target, draft, dtype)
    return materialise(jax.eval_shape(partial(laid_out, impl=impl), specs))


def state_bytes(buffers: Any) -> int:
    """Bytes of recurrent state that one cycle moves: each state is read once and written once."""
    if buffers.gdn is None:
        return 0
    return sum(2 * math.prod(x.state.shape) * x.state.dtype.itemsize for x in buffers.gdn.layers)


def weight_bytes(params: Params) -> int:
    """Bytes of weights that one decode cycle reads: each matrix once, the head for each reader.

    A Markov head's output is read for each draft, and so is all of an MTP head. Embeddings and
    codebooks are read a few rows at a time and do not count, a tied embedding does as the head;
    `fused_kv` repeats rows of the drafter's qkv and is read beside it.
    """

    def total(tree: Any) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    target, draft = params.target, params.draft
    draft = draft.inner if isinstance(draft, RuleParams) else draft
    head = total(target.lm_head)
    size = total(target.layers) + head
    if isinstance(draft, DraftParams):
        size += total((draft.fc, draft.fused_kv, draft.layers)) + head
        size += total(draft.selector.hidden_projection) if draft.selector else 0
        size += draft.config.max_drafts * total(draft.markov.out) if draft.markov else 0
    if isinstance(draft, MtpParams):
        size += draft.config.max_drafts * (total((draft.fc, draft.layer)) + head)
        size += total((draft.fc, draft.kv))  # of committed rows
    return size
