"""Checkpoints to params: one explicit name map a format, every tensor checked and used once.

q, k, v and gate, up are joined on the host, a layer at a time, and then put on the device, so a
model is never held twice. A tensor that nobody asks for is an error: it means that the file is not
what its config says.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.draft_weights import (
    check_pair,
    load_drafter,
    read_draft_config,
)
from dflash_jax.json_file import read_json
from dflash_jax.packaged import packaged_drafters
from dflash_jax.params import TargetParams
from dflash_jax.safetensors_io import read_checkpoint
from dflash_jax.target_layer_weights import read_norm, read_target_layer
from dflash_jax.tensor_source import TensorSource, same_bits

__all__ = [
    "DEFAULT_TARGET",
    "check_pair",
    "load_drafter",
    "load_tables",
    "load_target",
    "packaged_drafters",
    "read_configs",
    "read_draft_config",
    "resolve_target",
]

Progress = Callable[[int, int], None]  # layers loaded, layers in all
PathLike = str | os.PathLike[str]

DEFAULT_TARGET = "smollm2"

# Tensors that some exports carry and that inference does not read (spec/checkpoints.md §6).
_IGNORED_TARGET = ("mtp.",)
_LOG = logging.getLogger(__name__)
_IGNORED_NESTED = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("visual.", "vision_tower.", "multi_modal_projector.")
)


def resolve_target(path: PathLike) -> Path:
    """A checkpoint folder or .gguf file; the name "smollm2" downloads the default model."""
    if path == DEFAULT_TARGET:
        from dflash_jax.download import default_model

        return default_model()
    found = Path(path)
    if not os.fspath(path) or not found.exists():  # Path("") is the working directory
        raise FileNotFoundError(
            f"target {os.fspath(path)!r}: no such folder or file, and the only name is "
            f"{DEFAULT_TARGET!r}"
        )
    return found


def read_configs(path: PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """A target's config and generation config as Hugging Face dicts; the second may be empty."""
    path = resolve_target(path)
    if path.is_file():
        from dflash_jax.gguf import read_gguf

        return read_gguf(path).config, {}
    generation = path / "generation_config.json"
    return read_json(path / "config.json"), read_json(generation) if generation.is_file() else {}


def load_target(
    path: PathLike,
    *,
    dtype: Any = None,
    real_vocab: int | None = None,
    progress: Progress | None = None,
) -> TargetParams:
    """Load a Qwen3, Llama, Qwen3-MoE, Qwen3-Next or Qwen3.5 target, the text part alone.

    Args:
      path: a folder with config.json and safetensors, a .gguf file, or "smollm2".
      dtype: float32 or bfloat16; by default the file's own. float16 becomes float32, since the
        engine does not compute in it; a quantised GGUF becomes bfloat16.
      real_vocab: ids from here on are padding rows of the head and are never emitted; usually
        `Tokenizer.vocab_size`.
      progress: called after each layer.

    Raises:
      ValueError, FileNotFoundError: a file that is damaged or not what its config says.
      NotImplementedError: an architecture or storage type that is not built.
    """
    source, config, prefix = _open(path, dtype, real_vocab)
    params = _read_target(source, prefix, config, progress)
    source.finish()
    other = [name for name in source.left_out if name.startswith(_IGNORED_NESTED)]
    if other:
        _LOG.warning(
            "%s: the text part is loaded; %d tensors of others are left out (%s, ...)",
            source.path,
            len(other),
            other[0],
        )
    return params


def load_tables(path: PathLike, *, dtype: Any = None) -> TargetParams:
    """A target's embedding, head and norm without its layers: what drafters may share."""
    source, config, prefix = _open(path, dtype, None)
    return _read_target(source, prefix, replace(config, num_layers=0), None).replace(config=config)


def _open(
    path: PathLike, dtype: Any, real_vocab: int | None
) -> tuple[TensorSource, TargetConfig, str]:
    """A target's tensors, its config, and where the decoder's names start."""
    path = resolve_target(path)
    if path.is_file():
        from dflash_jax.gguf import read_gguf

        hf, tensors, _ = read_gguf(path)
        stored = np.dtype(hf["dtype"])
    else:
        hf = read_json(path / "config.json")
        _refuse_quantised(path, hf)
        tensors, stored = read_checkpoint(path), None
    config = TargetConfig.from_hf(hf)
    if real_vocab is not None:
        config = replace(config, real_vocab=min(real_vocab, config.vocab))
    is_nested = bool(hf.get("text_config"))
    source = TensorSource(path, tensors, _IGNORED_TARGET + (_IGNORED_NESTED if is_nested else ()))
    prefix = _target_prefix(source, is_nested)
    source.use_dtype(dtype, stored or source.peek(f"{prefix}embed_tokens.weight").dtype)
    return source, config, prefix


def _refuse_quantised(path: Path, hf: Mapping[str, Any]) -> None:
    found = hf.get("quantization_config") or {}
    if found:
        method = found.get("quant_method", "unknown") if isinstance(found, Mapping) else found
        raise NotImplementedError(
            f"{path}: quantised weights ({method}) are not supported, wanted float32, float16 or "
            "bfloat16, or a GGUF file"
        )


def _target_prefix(source: TensorSource, is_nested: bool) -> str:
    """Where the decoder's names start; only a nested config may have them elsewhere."""
    nested = ("model.language_model.", "language_model.model.") if is_nested else ()
    prefixes = (*nested, "model.")
    for prefix in prefixes:
        if f"{prefix}embed_tokens.weight" in source.names:
            return prefix
    wanted = " or ".join(repr(f"{prefix}embed_tokens.weight") for prefix in prefixes)
    raise ValueError(f"{source.path}: tensor {wanted} is missing")


def _read_target(
    source: TensorSource,
    prefix: str,
    config: TargetConfig,
    progress: Progress | None,
) -> TargetParams:
    embed_name = f"{prefix}embed_tokens.weight"
    head = _read_head(source, embed_name, config)
    embed = source.put(embed_name, config.vocab, config.width)
    layers = []
    for i in range(config.num_layers):
        layer = read_target_layer(
            source,
            f"{prefix}layers.{i}.",
            config,
            is_gdn=i in config.gdn_layers,
            has_experts=i in config.moe_layers,
        )
        layers.append(jax.block_until_ready(layer))
        if progress is not None:
            progress(i + 1, config.num_layers)
    return TargetParams(
        embed=embed,
        layers=tuple(layers),
        norm=read_norm(source, f"{prefix}norm.weight", config.width, config),
        head=head,
        config=config,
    )


def _read_head(source: TensorSource, embed_name: str, config: TargetConfig) -> jax.Array | None:
    """The head, or None when tied; a tied config beside another head is a contradiction."""
    names = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
    name = next((n for n in names if n in source.names), names[0])
    if not config.is_tied:
        return source.put(name, config.vocab, config.width)
    if name in source.names:
        if not same_bits(source.peek(name), source.peek(embed_name)):
            raise ValueError(
                f"{source.path}: tie_word_embeddings is true, but {name!r} differs from "
                f"{embed_name!r}; set it to false to use the head"
            )
        source.drop(name)
    return None
