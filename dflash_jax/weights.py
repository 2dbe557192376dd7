"""Checkpoints to params: one explicit name map a format, every tensor checked and used once.

q, k, v and gate, up are joined on the host, a layer at a time, and then put on the device, so a
model is never held twice. A tensor that nobody asks for is an error: it means that the file is not
what its config says.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.json_file import read_json
from dflash_jax.params import (
    ConvParams,
    DraftParams,
    LayerParams,
    SelectorParams,
    TargetParams,
)
from dflash_jax.safetensors_io import read_checkpoint
from dflash_jax.tensor_source import TensorSource, same_bits

Progress = Callable[[int, int], None]  # layers loaded, layers in all
PathLike = str | os.PathLike[str]

DEFAULT_TARGET = "smollm2"
PACKAGED_DRAFTERS = ("smollm2-dflash2", "smollm2-dflash")

_DTYPES = ("bfloat16", "float16", "float32")

# Tensors that some exports carry and that inference does not read (spec/checkpoints.md §6).
_IGNORED_TARGET = ("mtp.",)
_IGNORED_NESTED = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("visual.", "vision_tower.", "multi_modal_projector.")
)
_IGNORED_DRAFTER = ("t2d", "verifier_lm_head.", "verifier_norm.")
# Tensors that tell a drafter of another family or variant.
_FOREIGN_DRAFTER = {
    "aux_hidden_norms": "a Laguna drafter",
    "encoder.": "a Muse-Glimmer drafter",
    "markov": "a DSpark drafter",
    "confidence": "a DSpark drafter",
    "mtp.": "an MTP head",
    "sink": "attention sinks (MiMo)",
    "d2t": "a reduced draft vocabulary",
}


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
    """Load a Qwen3 or Llama target.

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
    embed_name = f"{prefix}embed_tokens.weight"
    source.use_dtype(dtype, stored or source.peek(embed_name).dtype)
    params = _read_target(source, prefix, embed_name, config, progress)
    source.finish()
    return params


def read_draft_config(path: PathLike, *, num_target_layers: int | None = None) -> DraftConfig:
    """A drafter's config, without reading its weights; arguments as those of `load_drafter`."""
    folder = _drafter_folder(path)
    hf = _draft_hf(folder, _plain_names(folder, read_checkpoint(folder)))
    return DraftConfig.from_hf(hf, num_target_layers=num_target_layers)


def load_drafter(
    path: PathLike, target: TargetParams | None = None, *, dtype: Any = None
) -> DraftParams:
    """Load a DFlash or DFlash2 drafter in z-lab or SpecForge format.

    Args:
      path: a folder, or the name of a drafter that comes with the package.
      target: the model it drafts for; given, the pair is checked.
      dtype: float32 or bfloat16; by default the target's, else the file's own.

    Raises:
      ValueError, FileNotFoundError: a damaged file, or a pair that does not fit.
      NotImplementedError: a drafter family or variant that is not built.
    """
    folder = _drafter_folder(path)
    if (folder / "mask_embedding.pt").exists():
        raise NotImplementedError(
            f"{folder}: mask_embedding.pt replaces the mask token's embedding, which is not "
            "supported; wanted a drafter that uses the target's row"
        )
    tensors = _plain_names(folder, read_checkpoint(folder))
    hf = _draft_hf(folder, tensors)
    config = DraftConfig.from_hf(
        hf, num_target_layers=None if target is None else target.config.num_layers
    )
    source = TensorSource(folder, tensors, _IGNORED_DRAFTER)
    _refuse_foreign(source)
    stored = source.peek("fc.weight").dtype
    if stored == np.int8:
        name = hf.get("dtype") or "bfloat16"  # what the int8 numbers were made from
        if name not in _DTYPES:
            raise ValueError(f"{folder}: dtype is {name!r}, wanted one of {', '.join(_DTYPES)}")
        stored = jax.numpy.dtype(name)
    source.use_dtype(dtype, stored if target is None else target.embed.dtype)
    if target is not None:
        check_pair(target.config, config, who=str(folder))
    _drop_shared(source, target)
    params = _read_drafter(source, config, target)
    source.finish()
    return params


def check_pair(target: TargetConfig, draft: DraftConfig, *, who: str) -> None:
    """Raise ValueError unless the drafter fits the target (spec/checkpoints.md §6)."""
    for what, found, wanted in (
        ("hidden_size", draft.width, target.width),
        ("vocab_size", draft.vocab, target.vocab),
        ("num_target_layers", draft.num_target_layers, target.num_layers),
    ):
        if found != wanted:
            raise ValueError(f"{who}: drafter has {what} {found}, its target has {wanted}")
    if draft.target_layer_ids[-1] > target.num_layers - 2:
        # Reference code stores the last layer after the final norm, so nobody trains on it.
        raise ValueError(
            f"{who}: target_layer_ids {list(draft.target_layer_ids)} use the target's last layer, "
            f"wanted ids up to {target.num_layers - 2}"
        )


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
    embed_name: str,
    config: TargetConfig,
    progress: Progress | None,
) -> TargetParams:
    head = _read_head(source, embed_name, config)
    embed = source.put(embed_name, config.vocab, config.width)
    layers = []
    for i in range(config.num_layers):
        name = f"{prefix}layers.{i}."
        layers.append(jax.block_until_ready(_read_layer(source, name, config)))
        if progress is not None:
            progress(i + 1, config.num_layers)
    return TargetParams(
        embed=embed,
        layers=tuple(layers),
        norm=source.put(f"{prefix}norm.weight", config.width),
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


def _read_layer(source: TensorSource, at: str, c: TargetConfig | DraftConfig) -> LayerParams:
    """One decoder layer whose names start with `at`."""
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    has_qk_norm = isinstance(c, DraftConfig) or c.has_qk_norm
    conv = c if isinstance(c, DraftConfig) and c.kind == "dflash2" else None

    def joined(module: str, parts: Mapping[str, int], what: str, *rest: int) -> jax.Array:
        fused = f"{at}{module}_proj.{what}"
        folder = fused.rsplit(".", 2)[0]
        names = {f"{folder}.{part}_proj.{what}": rows for part, rows in parts.items()}
        return jax.device_put(source.rows(fused, names, *rest))

    heads = {"q": query, "k": kv, "v": kv}
    return LayerParams(
        input_norm=source.put(f"{at}input_layernorm.weight", c.width),
        qkv=joined("self_attn.qkv", heads, "weight", c.width),
        o=source.put(f"{at}self_attn.o_proj.weight", c.width, query),
        post_norm=source.put(f"{at}post_attention_layernorm.weight", c.width),
        gate_up=joined("mlp.gate_up", {"gate": c.ffn, "up": c.ffn}, "weight", c.width),
        down=source.put(f"{at}mlp.down_proj.weight", c.width, c.ffn),
        q_norm=source.maybe(f"{at}self_attn.q_norm.weight", c.head_dim, wanted=has_qk_norm),
        k_norm=source.maybe(f"{at}self_attn.k_norm.weight", c.head_dim, wanted=has_qk_norm),
        qkv_bias=joined("self_attn.qkv", heads, "bias") if c.has_attention_bias else None,
        o_bias=source.maybe(f"{at}self_attn.o_proj.bias", c.width, wanted=c.has_attention_bias),
        attention_conv=None if conv is None else _read_conv(source, f"{at}attention_conv.", conv),
        mlp_conv=None if conv is None else _read_conv(source, f"{at}mlp_conv.", conv),
    )


def _read_conv(source: TensorSource, at: str, c: DraftConfig) -> ConvParams:
    rows = 2 * c.conv_taps * c.num_conv_groups
    return ConvParams(
        base=source.put(f"{at}base_kernel", 2, c.conv_taps, c.width),
        projection=source.put(f"{at}kernel_projection.weight", rows, c.width),
    )


def _read_drafter(source: TensorSource, c: DraftConfig, target: TargetParams | None) -> DraftParams:
    target_width = c.width if target is None else target.config.width
    fc = source.put("fc.weight", c.width, len(c.target_layer_ids) * target_width)
    layers = tuple(_read_layer(source, f"layers.{i}.", c) for i in range(c.num_layers))
    first_key = c.num_heads * c.head_dim
    return DraftParams(
        fc=fc,
        hidden_norm=source.put("hidden_norm.weight", c.width),
        fused_kv=_key_value_rows([layer.qkv for layer in layers], first_key),
        fused_kv_bias=(
            _key_value_rows([layer.qkv_bias for layer in layers], first_key)
            if c.has_attention_bias
            else None
        ),
        layers=layers,
        norm=source.put("norm.weight", c.width),
        selector=_read_selector(source, c) if c.kind == "dflash2" else None,
        config=c,
    )


def _key_value_rows(joined: Iterable[jax.Array | None], first_key: int) -> jax.Array:
    """Key and value rows of every layer, one below the other; on the host, to compile nothing."""
    return jax.device_put(np.concatenate([np.asarray(rows)[first_key:] for rows in joined]))


def _read_selector(source: TensorSource, c: DraftConfig) -> SelectorParams:
    def codebook(name: str) -> jax.Array:
        # A bare parameter; some ports make it a module and append .weight.
        name = f"candidate_selector.{name}"
        return source.put(
            f"{name}.weight" if f"{name}.weight" in source.names else name, c.vocab, c.selector_rank
        )

    return SelectorParams(
        hidden_projection=source.put(
            "candidate_selector.hidden_projection.weight", c.selector_rank, c.width
        ),
        predecessor=codebook("predecessor_codebook"),
        successor=codebook("successor_codebook"),
    )


def _drafter_folder(path: PathLike) -> Path:
    if path in PACKAGED_DRAFTERS:
        folder = Path(__file__).parent / "assets" / "drafters" / str(path)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"drafter {path!r} is not in this build of the package")
        return folder
    folder = Path(path)
    if not os.fspath(path) or not folder.is_dir():
        raise FileNotFoundError(
            f"drafter {os.fspath(path)!r}: no such folder, and the names are "
            f"{', '.join(PACKAGED_DRAFTERS)}"
        )
    return folder


def _draft_hf(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """config.json; where it names no architecture, the tensors tell (spec/checkpoints.md §1)."""
    hf = read_json(folder / "config.json")
    if hf.get("architectures"):
        return hf
    is_second = any(name.startswith("candidate_selector.") for name in names)
    return {**hf, "architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"]}


def _plain_names(folder: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Strip the `model.` of some exports and undo the `midlayer.` of others."""
    plain: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        if short.startswith("midlayer."):
            short = "layers.0." + short.removeprefix("midlayer.")
        if short in plain:
            raise ValueError(f"{folder}: two tensors are named {short!r}, one of them {name!r}")
        plain[short] = tensor
    return plain


def _refuse_foreign(source: TensorSource) -> None:
    for name in sorted(source.names):
        for part, what in _FOREIGN_DRAFTER.items():
            if name.startswith(part) or f".{part}" in name or f"_{part}" in name:
                raise NotImplementedError(
                    f"{source.path}: tensor {name!r} belongs to {what}, which is not supported; "
                    "wanted a z-lab or SpecForge DFlash or DFlash2 drafter"
                )


def _drop_shared(source: TensorSource, target: TargetParams | None) -> None:
    """Drop copies of the target's embedding and head; any other is not supported."""
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in source.names:
            continue
        own = None if target is None else target.embed if "embed" in name else target.lm_head
        if own is None or not same_bits(source.peek(name).astype(own.dtype), own):
            raise NotImplementedError(
                f"{source.path}: the drafter's own {name!r} is not the target's, which is not "
                "supported; wanted a drafter that shares the target's"
            )
        source.drop(name)
