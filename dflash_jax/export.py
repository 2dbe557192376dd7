"""Write drafters in their publishers' forms, in full or as int8 with float scales.

int8 is this project's own storage: a matrix `NAME` is I8 with `NAME.scale`, f32, one a row. Tables
of the vocabulary (the selector's codebooks, the Markov head's two) have `NAME.column_scale`, one a
column: a scale for each of their short rows would be nearly as large as the rows.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config import DraftConfig
from dflash_jax.export_forms import OWNERS, drafter_to_hf
from dflash_jax.layer_export import layer_tensors
from dflash_jax.mask_embedding import NAME as MASK_EMBEDDING
from dflash_jax.mask_embedding import write_mask_embedding
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.mtp_export import head_tensors, head_to_hf
from dflash_jax.params import (
    ByInput,
    ConfidenceParams,
    DraftParams,
    MarkovParams,
    MtpParams,
    TargetParams,
)
from dflash_jax.safetensors_io import SINGLE_NAME, write_file

_TABLE_ENDINGS = ("_codebook", "markov_w1", "markov_w2")


def save_drafter(
    params: DraftParams,
    folder: str | os.PathLike[str],
    *,
    form: str = "zlab",
    target: TargetParams | None = None,
    int8: bool = False,
) -> None:
    """Write config.json and model.safetensors that `load_drafter` reads back.

    Args:
      form: zlab (DSpark as SpecForge writes it), deepspec or speculators.
      target: whose embedding and head are written where the form has a place for them and the
        drafter has none; DeepSpec's needs them.
      int8: z-lab's form alone.

    Raises:
      ValueError: what the form cannot say; nothing is written then.
    """
    folder = Path(folder)
    if int8 and form != "zlab":
        raise ValueError(f"drafter: int8 is stored in z-lab's form alone, not in {OWNERS[form]}")
    drafter_to_hf(params.config, form)
    tensors = drafter_tensors(params) | _tables(params, form, target)
    write_drafter(folder, params.config, tensors, form=form, int8=int8)
    if params.mask_embed is not None and form == "zlab":
        row = np.asarray(params.mask_embed)
        write_mask_embedding(folder / MASK_EMBEDDING, row, params.config.mask_id)


def write_drafter(
    folder: str | os.PathLike[str],
    config: DraftConfig | MtpConfig,
    tensors: Mapping[str, Any],
    *,
    form: str = "zlab",
    int8: bool = False,
) -> None:
    """Write a drafter given by checkpoint names; matrices are `[out, in]`.

    An MTP head has one form of its own, whatever `form` says.

    Raises:
      ValueError: a config that the form's keys cannot say.
    """
    folder = Path(folder)
    is_head = isinstance(config, MtpConfig)
    hf = head_to_hf(config) if is_head else drafter_to_hf(config, form)
    arrays = {name: np.asarray(x) for name, x in tensors.items()}
    hf["dtype"] = str(arrays["mtp.norm.weight" if is_head else "norm.weight"].dtype)
    if int8:
        arrays = _quantised(arrays)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / SINGLE_NAME, arrays, {"format": "pt"})
    temporary = folder / f".config.json.{os.getpid()}.part"
    try:
        temporary.write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, folder / "config.json")
    finally:
        temporary.unlink(missing_ok=True)


def drafter_tensors(params: DraftParams | MtpParams) -> dict[str, np.ndarray]:
    """Params as checkpoint tensors: q, k, v and gate, up apart again.

    Raises:
      ValueError: weights that `turn_weights` has turned.
    """
    if isinstance(params.fc, ByInput):
        raise ValueError(
            f"export: the {params.config.kind} drafter's weights are turned to [in, out], wanted "
            "them as load_drafter gives them"
        )
    if isinstance(params, MtpParams):
        return head_tensors(params)
    tensors = {
        "fc.weight": params.fc,
        "hidden_norm.weight": params.hidden_norm,
        "norm.weight": params.norm,
    }
    for i, layer in enumerate(params.layers):
        tensors |= layer_tensors(layer, f"layers.{i}.", params.config)
    if params.selector is not None:
        at = "candidate_selector."
        tensors |= {
            f"{at}hidden_projection.weight": params.selector.hidden_projection,
            f"{at}predecessor_codebook": params.selector.predecessor,
            f"{at}successor_codebook": params.selector.successor,
        }
    tensors |= _markov_tensors(params.markov, params.config.markov_kind)
    tensors |= _confidence_tensors(params.confidence)
    return {name: np.asarray(x) for name, x in tensors.items()}


def _markov_tensors(markov: MarkovParams | None, kind: str) -> dict[str, Any]:
    if markov is None:
        return {}
    at = "markov_head."
    tensors = {f"{at}markov_w1.weight": markov.embed, f"{at}markov_w2.weight": markov.out}
    if markov.mix is not None:
        name = {"gated": "gate_proj", "rnn": "joint_proj"}[kind]
        tensors |= {f"{at}{name}.weight": markov.mix, f"{at}{name}.bias": markov.mix_bias}
    return tensors


def _confidence_tensors(confidence: ConfidenceParams | None) -> dict[str, Any]:
    if confidence is None:
        return {}
    at = "confidence_head.proj."
    return {f"{at}weight": confidence.weight, f"{at}bias": confidence.bias}


def _tables(params: DraftParams, form: str, target: TargetParams | None) -> dict[str, np.ndarray]:
    """Embedding, head and id map, where the form has a place for them."""
    own = {"an embedding": params.embed, "a head": params.head, "an id map": params.d2t}
    places = {"zlab": (), "deepspec": ("an embedding", "a head"), "speculators": tuple(own)}
    for what, table in own.items():
        if table is not None and what not in places[form]:
            raise ValueError(
                f"drafter: {OWNERS[form]} form has no place for {what} of the drafter's own; name "
                "the target if it is a copy"
            )
    if form == "zlab":
        return {}
    embed, head = params.embed, params.head
    if target is not None:
        embed = target.embed if embed is None else embed
        head = target.lm_head if head is None else head
    has_all = embed is not None and (head is not None or form != "deepspec")
    if not has_all and (form == "deepspec" or params.mask_embed is not None):
        raise ValueError(
            f"drafter: {OWNERS[form]} form keeps what this drafter shares with its target in the "
            "drafter's own tables; name the target"
        )
    tables = {"embed_tokens.weight": embed, "lm_head.weight": head}
    found = {name: np.array(x) for name, x in tables.items() if x is not None}
    if params.mask_embed is not None:
        found["embed_tokens.weight"][params.config.mask_id] = np.asarray(params.mask_embed)
    return found | _map_tensors(params)


def _map_tensors(params: DraftParams) -> dict[str, np.ndarray]:
    """The map as offsets, and the flags of the ids that it reaches."""
    if params.d2t is None:
        return {}
    ids = np.asarray(params.d2t, np.int64)
    selected = np.zeros(params.config.vocab, np.bool_)
    selected[ids] = True
    return {"d2t": ids - np.arange(len(ids)), "t2d": selected}


def _quantised(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices as int8 with a scale; norms, biases and base kernels as they are."""
    stored: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim != 2:
            stored[name] = array
            continue
        is_table = name.removesuffix(".weight").endswith(_TABLE_ENDINGS)
        axis = 0 if is_table else 1  # the axis that shares a scale
        wide = array.astype(np.float32)
        scale = np.abs(wide).max(axis=axis) / 127.0
        scale = np.where(scale == 0.0, 1.0, scale).astype(np.float32)
        stored[name] = np.rint(wide / np.expand_dims(scale, axis)).astype(np.int8)
        stored[name + (".column_scale" if is_table else ".scale")] = scale
    return stored
