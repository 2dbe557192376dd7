"""Drafter checkpoints to params: folders in the forms of their publishers, checked and loaded.

Configs are brought to one form by `draft_forms`, tensor names by `_plain_names`. A copy of the
target's embedding or head is dropped; one of its own is kept, and so is the map of a head that
knows a part of the vocabulary.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.draft_forms import DraftForm, draft_form
from dflash_jax.json_file import read_json
from dflash_jax.layer_weights import read_layer
from dflash_jax.mask_embedding import NAME as MASK_EMBEDDING
from dflash_jax.mask_embedding import MaskEmbedding, read_mask_embedding
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.mtp_weights import check_head, has_head, load_head, read_head_config
from dflash_jax.packaged import packaged_drafters, packaged_folder
from dflash_jax.pairs import check_pair
from dflash_jax.params import (
    ConfidenceParams,
    DraftParams,
    MarkovParams,
    MtpParams,
    SelectorParams,
    TargetParams,
)
from dflash_jax.safetensors_io import read_checkpoint
from dflash_jax.tensor_source import HeaderSource, TensorSource, full_dtype, same_bits

PathLike = str | os.PathLike[str]

_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"
# Tensors that some exports carry and that inference does not read (spec/checkpoints.md §6).
_IGNORED_DRAFTER = ("verifier_lm_head.", "verifier_norm.")
# Tensors that tell a drafter of another family or variant.
_FOREIGN_DRAFTER = {
    "aux_hidden_norms": "a Laguna drafter",
    "encoder.": "a Muse-Glimmer drafter",
    "prefix_gru": "a Domino drafter",
    "mtp.": "an MTP head",
    "sink": "attention sinks (MiMo)",
}
# What ports call some tensors (spec/checkpoints.md §3.1, §3.3).
_ALIASES = {
    "midlayer.": "layers.0.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}


def read_draft_config(
    path: PathLike, *, num_target_layers: int | None = None
) -> DraftConfig | MtpConfig:
    """A drafter's config, without reading its weights; arguments as those of `load_drafter`.

    Tables that the file has count as its own, though they may turn out to be the target's.
    """
    folder = drafter_folder(path)
    tensors = _plain_names(folder, read_checkpoint(folder))
    if has_head(tensors):
        return read_head_config(folder)
    return _config(folder, tensors, _mask_embedding(folder), num_target_layers)


def read_draft_form(path: PathLike, *, num_target_layers: int | None = None) -> DraftForm:
    """In which publisher's form a drafter is, and its config under that form's flat keys."""
    folder = drafter_folder(path)
    tensors = _plain_names(folder, read_checkpoint(folder))
    return draft_form(
        _hf(folder, tensors, _mask_embedding(folder), num_target_layers), num_target_layers
    )


def load_drafter(
    path: PathLike, target: TargetParams | None = None, *, dtype: Any = None
) -> DraftParams | MtpParams:
    """Load a DFlash, DFlash2 or DSpark drafter in any publisher's form, or an MTP head.

    Args:
      path: a folder, or the name of a drafter that comes with the package. A target's own folder
        names its multi-token-prediction head, where it has one.
      target: the model it drafts for; given, the pair is checked and equal tables are shared.
      dtype: float32 or bfloat16; by default the target's, else the file's own.

    Raises:
      ValueError, FileNotFoundError: a damaged file, or a pair that does not fit.
      NotImplementedError: a drafter family or variant that is not built.
    """
    folder = drafter_folder(path)
    tensors = _plain_names(folder, read_checkpoint(folder))
    if has_head(tensors):
        return load_head(folder, tensors, target, dtype=dtype)
    mask = _mask_embedding(folder)
    layers = None if target is None else target.config.num_layers
    config = _config(folder, tensors, mask, layers)
    source = TensorSource(folder, tensors, _IGNORED_DRAFTER)
    _refuse_foreign(source)
    hf = read_json(folder / "config.json")
    stored = full_dtype(folder, source.peek("fc.weight"), hf)
    source.use_dtype(dtype, stored if target is None else target.embed.dtype)
    if target is not None:
        _drop_shared(source, target)
        config = replace(config, has_embed=_EMBED in source.names, has_head=_HEAD in source.names)
        check_pair(target.config, config, who=str(folder))
    params = _read_drafter(source, config, mask, None if target is None else target.config)
    source.finish()
    return params


def check_tensors(path: PathLike, target: TargetConfig) -> int:
    """Check every tensor of a drafter by the headers of its files, and count them.

    Raises:
      ValueError, NotImplementedError: as `load_drafter` for a target of that config.
    """
    folder = drafter_folder(path)
    tensors = _plain_names(folder, read_checkpoint(folder))
    if has_head(tensors):
        return check_head(folder, tensors)
    mask = _mask_embedding(folder)
    config = _config(folder, tensors, mask, target.num_layers)
    source = HeaderSource(folder, tensors, _IGNORED_DRAFTER)
    _refuse_foreign(source)
    _read_drafter(source, config, mask, target)
    source.finish()
    return len(tensors)


def stored_dtype(path: PathLike) -> np.dtype:
    """dtype that a drafter's weights have in its file, or had before they became int8."""
    folder = drafter_folder(path)
    tensors = _plain_names(folder, read_checkpoint(folder))
    name = "mtp.fc.weight" if has_head(tensors) else "fc.weight"
    array = TensorSource(folder, tensors, ()).peek(name)
    return full_dtype(folder, array, read_json(folder / "config.json"))


def drafter_folder(path: PathLike) -> Path:
    """Where a drafter lies: a folder, or the name of one that comes with the package."""
    if (folder := packaged_folder(path)) is not None:
        return folder
    folder = Path(path)
    if not os.fspath(path) or not folder.is_dir():
        raise FileNotFoundError(
            f"drafter {os.fspath(path)!r}: no such folder, and the names are "
            f"{', '.join(packaged_drafters())}"
        )
    return folder


def _config(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    mask: MaskEmbedding | None,
    num_target_layers: int | None,
) -> DraftConfig:
    hf = _hf(folder, tensors, mask, num_target_layers)
    config = DraftConfig.from_hf(hf, num_target_layers=num_target_layers)
    return replace(config, has_embed=_EMBED in tensors, has_head=_HEAD in tensors)


def _hf(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    mask: MaskEmbedding | None,
    num_target_layers: int | None,
) -> dict[str, Any]:
    """What config.json says; where it names no architecture, the tensors tell."""
    hf = read_json(folder / "config.json")
    if not hf.get("architectures") and hf.get("speculators_model_type") is None:
        hf["architectures"] = [_architecture(tensors)]
    if mask is not None and mask.mask_id is not None:
        said = draft_form(hf, num_target_layers).facts.get("mask_token_id")
        if said is None:
            hf["mask_token_id"] = mask.mask_id
        elif said != mask.mask_id:
            raise ValueError(
                f"{folder}: {MASK_EMBEDDING} is of token {mask.mask_id}, but mask_token_id is "
                f"{said} in config.json"
            )
    return hf


def _architecture(names: Iterable[str]) -> str:
    """Family by the tensors that only it has (spec/checkpoints.md §1)."""
    firsts = {name.split(".")[0] for name in names}
    if "candidate_selector" in firsts:
        return "DFlash2DraftModel"
    return "DSparkDraftModel" if "markov_head" in firsts else "DFlashDraftModel"


def _mask_embedding(folder: Path) -> MaskEmbedding | None:
    path = folder / MASK_EMBEDDING
    return read_mask_embedding(path) if path.exists() else None


def _plain_names(folder: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Strip the `model.` of some exports and undo the names of others."""
    plain: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.")
        for alias, wanted in _ALIASES.items():
            if short.startswith(alias):
                short = wanted + short.removeprefix(alias)
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
                    "wanted a DFlash, DFlash2 or DSpark drafter"
                )


def _drop_shared(source: TensorSource, target: TargetParams) -> None:
    """Drop copies of the target's embedding and head."""
    for name, table in ((_EMBED, target.embed), (_HEAD, target.lm_head)):
        if name in source.names:
            own = source.peek(name)
            if own.shape == table.shape and same_bits(own.astype(table.dtype), table):
                source.drop(name)


def _read_drafter(
    source: TensorSource, c: DraftConfig, mask: MaskEmbedding | None, target: TargetConfig | None
) -> DraftParams:
    target_width = c.width if target is None else target.width
    fc = source.put("fc.weight", c.width, len(c.target_layer_ids) * target_width)
    layers = tuple(read_layer(source, f"layers.{i}.", c) for i in range(c.num_layers))
    first_key = c.num_heads * c.head_dim
    return DraftParams(
        fc=fc,
        hidden_norm=source.put("hidden_norm.weight", c.width),
        fused_kv=source.place(_key_value_rows([layer.qkv for layer in layers], first_key)),
        fused_kv_bias=(
            source.place(_key_value_rows([layer.qkv_bias for layer in layers], first_key))
            if c.has_attention_bias
            else None
        ),
        layers=layers,
        norm=source.put("norm.weight", c.width),
        selector=_read_selector(source, c) if c.kind == "dflash2" else None,
        config=c,
        markov=_read_markov(source, c) if c.markov_rank else None,
        confidence=_read_confidence(source, c) if c.has_confidence else None,
        embed=source.maybe(_EMBED, c.vocab, c.width, wanted=c.has_embed),
        mask_embed=None if mask is None else _mask_row(source, c, mask),
        head=source.maybe(
            _HEAD, c.num_draft_ids, c.width, wanted=c.has_head or c.draft_vocab is not None
        ),
        d2t=_read_map(source, c, c.vocab if target is None else target.vocab),
    )


def _key_value_rows(joined: Iterable[jax.Array | None], first_key: int) -> np.ndarray:
    """Key and value rows of every layer, one below the other; on the host, to compile nothing."""
    return np.concatenate([np.asarray(rows)[first_key:] for rows in joined])


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


def _read_markov(source: TensorSource, c: DraftConfig) -> MarkovParams:
    """The first table is looked up by target ids; the second one scores the drafter's own."""
    at, rank, width = "markov_head.", c.markov_rank, c.width
    mixes = {"gated": ("gate_proj", rank, width + rank), "rnn": ("joint_proj", 3 * rank, 0)}
    mix = mix_bias = None
    if c.markov_kind in mixes:
        name, rows, columns = mixes[c.markov_kind]
        mix = source.put(f"{at}{name}.weight", rows, columns or 2 * rank + width)
        mix_bias = source.put(f"{at}{name}.bias", rows)
    return MarkovParams(
        embed=source.put(f"{at}markov_w1.weight", c.vocab, rank),
        out=source.put(f"{at}markov_w2.weight", c.num_draft_ids, rank),
        mix=mix,
        mix_bias=mix_bias,
    )


def _read_confidence(source: TensorSource, c: DraftConfig) -> ConfidenceParams:
    columns = c.width + (c.markov_rank if c.confidence_reads_markov else 0)
    return ConfidenceParams(
        weight=source.put("confidence_head.proj.weight", 1, columns),
        bias=source.put("confidence_head.proj.bias", 1),
    )


def _mask_row(source: TensorSource, c: DraftConfig, mask: MaskEmbedding) -> jax.Array:
    if mask.vector.shape != (c.width,):
        raise ValueError(
            f"{source.path / MASK_EMBEDDING}: {mask.vector.size} numbers, wanted hidden_size, "
            f"{c.width}"
        )
    return source.place(mask.vector.astype(source.dtype))


def _read_map(source: TensorSource, c: DraftConfig, vocab: int) -> jax.Array | None:
    """Target ids i32[Vd] of the head's own ids; the file holds each one's distance from it."""
    if "d2t" not in source.names and c.draft_vocab is None:
        source.names.discard("t2d")  # without a map there is nothing to select
        return None
    rows, offsets = c.num_draft_ids, source.peek("d2t")
    source.drop("d2t")
    where = f"{source.path}: tensor 'd2t'"
    if offsets.shape != (rows,) or offsets.dtype.kind not in "iu":
        raise ValueError(
            f"{where} is {offsets.dtype}{list(offsets.shape)}, wanted integers [{rows}]"
        )
    ids = np.arange(rows) + offsets.astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        raise ValueError(
            f"{where} maps draft id {outside[0]} to {ids[outside[0]]}, outside the target's "
            f"vocabulary of {vocab}"
        )
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) != rows:
        raise ValueError(f"{where} maps {counts.max()} draft ids to {unique[counts.argmax()]}")
    _check_selection(source, c, ids)
    if not offsets.any():
        return None
    if not c.has_head:
        raise ValueError(f"{where} maps ids of a head, but 'lm_head.weight' is missing")
    return source.place(ids.astype(np.int32))


def _check_selection(source: TensorSource, c: DraftConfig, ids: np.ndarray) -> None:
    """`t2d`, a flag a target id, is for training; it must not contradict `d2t`."""
    if "t2d" not in source.names:
        return
    selected = source.peek("t2d")
    source.drop("t2d")
    if selected.shape != (c.vocab,) or set(np.flatnonzero(selected)) != set(ids.tolist()):
        raise ValueError(f"{source.path}: tensor 't2d' does not select the ids that 'd2t' maps to")
