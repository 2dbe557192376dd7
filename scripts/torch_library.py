"""The PyTorch side's hybrid target in `dflash_jax`, to show that the two do the same work."""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch_cycle import RMS_EPS, ROPE_THETA, Layer, Target
from torch_gdn import GdnLayer
from torch_shapes import Shapes

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout without installing

from dflash_jax import targets
from dflash_jax.config import RuleConfig, TargetConfig
from dflash_jax.fixed import plan
from dflash_jax.metadata import rows_metadata
from dflash_jax.params import GdnParams, LayerParams, TargetParams
from dflash_jax.state import init_buffers

_ROWS, _PAGE = 64, 16


def forward(target: Target, model: Shapes, tokens: list[int]) -> torch.Tensor:
    """Rows f32[T, E] behind the library's final norm, of at most 64 tokens as one prefill."""
    ids = jnp.asarray(tokens + [0] * (_ROWS - len(tokens)), jnp.int32)
    hidden = _compiled(model)(_params(target, _config(model)), ids, jnp.int32(len(tokens)))
    return torch.from_numpy(np.array(hidden[: len(tokens)]))


@cache
def _config(model: Shapes) -> TargetConfig:
    c = model.recurrent
    if c is None:
        raise ValueError("torch_library: the target has no recurrent layer, wanted a hybrid one")
    return TargetConfig.from_hf(
        {
            "model_type": "qwen3_5_text",
            "hidden_size": model.width,
            "intermediate_size": model.ffn,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "vocab_size": model.vocab,
            "tie_word_embeddings": model.is_tied,
            "linear_num_key_heads": c.key_heads,
            "linear_num_value_heads": c.value_heads,
            "linear_key_head_dim": c.key_dim,
            "linear_value_head_dim": c.value_dim,
            "linear_conv_kernel_dim": c.taps,
            "rms_norm_eps": RMS_EPS,
            "rope_theta": ROPE_THETA,
            "max_position_embeddings": 4096,
        }
    )


def _params(target: Target, config: TargetConfig) -> TargetParams:
    return TargetParams(
        embed=_array(target.embed),
        layers=tuple(
            _layer(layer, _array(norm))
            for layer, norm in zip(target.layers, target.norms[:-1], strict=True)
        ),
        norm=_array(target.norms[-1]),
        head=None if config.is_tied else _array(target.head),
        config=config,
    )


def _array(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(x.numpy())


def _layer(layer: Layer | GdnLayer, input_norm: jax.Array) -> LayerParams:
    shared: dict[str, Any] = {
        name: _array(getattr(layer, name)) for name in ("post_norm", "gate_up", "down")
    }
    if isinstance(layer, GdnLayer):
        names = ("in_proj", "conv", "a_log", "dt_bias", "norm", "out")
        gdn = GdnParams(**{name: _array(getattr(layer, name)) for name in names})
        return LayerParams(input_norm=input_norm, qkv=None, o=None, gdn=gdn, **shared)
    own: dict[str, Any] = {
        name: _array(getattr(layer, name)) for name in ("qkv", "q_norm", "k_norm")
    }
    return LayerParams(input_norm=input_norm, o=_array(layer.out), **own, **shared)


@cache
def _compiled(model: Shapes) -> Any:
    config = _config(model)
    fixed = plan(
        config,
        RuleConfig("none", 0),
        batch=1,
        max_context=_ROWS,
        page_size=_PAGE,
        prefill_chunk=_ROWS,
        dtype="float32",
    )

    def run(params: TargetParams, ids: jax.Array, count: jax.Array) -> jax.Array:
        zero = jnp.zeros((1,), jnp.int32)
        pages = fixed.meta.pages
        table = jnp.arange(pages, dtype=jnp.int32)[None]
        meta = rows_metadata(zero, count[None], table, _ROWS, _PAGE)
        args = jnp.stack((count, zero[0], zero[0])).astype(jnp.uint32)[None]
        out = targets.forward(
            params, ids, meta, args, init_buffers(fixed), slots=zero, is_prefill=True
        )
        return out.hidden

    return jax.jit(run)
