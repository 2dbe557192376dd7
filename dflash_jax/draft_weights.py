"""Drafter checkpoints to params: folders in the forms of their publishers, checked and loaded."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.json_file import read_json
from dflash_jax.layer_weights import read_layer
from dflash_jax.params import DraftParams, SelectorParams, TargetParams
from dflash_jax.safetensors_io import read_checkpoint
from dflash_jax.tensor_source import TensorSource, same_bits

PathLike = str | os.PathLike[str]

PACKAGED_DRAFTERS = ("smollm2-dflash2", "smollm2-dflash")

_DTYPES = ("bfloat16", "float16", "float32")
# Tensors that some exports carry and that inference does not read (spec/checkpoints.md §6).
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


def _read_drafter(source: TensorSource, c: DraftConfig, target: TargetParams | None) -> DraftParams:
    target_width = c.width if target is None else target.config.width
    fc = source.put("fc.weight", c.width, len(c.target_layer_ids) * target_width)
    layers = tuple(read_layer(source, f"layers.{i}.", c) for i in range(c.num_layers))
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
