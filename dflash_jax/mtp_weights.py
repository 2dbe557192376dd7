"""Multi-token-prediction heads: the `mtp.*` tensors of a target's checkpoint, or a file of them.

A folder holds a head if its tensors are named so; the target's own tensors beside them are not
read. Names are those of Qwen3-Next and Qwen3.5 (spec/drafters.md §6).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflash_jax.json_file import read_json
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.pairs import check_pair
from dflash_jax.params import MtpParams, TargetParams
from dflash_jax.target_layer_weights import read_norm, read_target_layer
from dflash_jax.tensor_source import HeaderSource, TensorSource, full_dtype

PREFIX = "mtp."
ARCHITECTURE = "MtpDraftModel"  # in the config.json of a folder that holds a head alone


def has_head(tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether a checkpoint is a target with an MTP head, or a head alone."""
    return "fc.weight" not in tensors and any(name.startswith(PREFIX) for name in tensors)


def read_head_config(folder: Path) -> MtpConfig:
    """The head's config; that of its target where the head lies in its folder."""
    return MtpConfig.from_hf(read_json(folder / "config.json"))


def load_head(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    target: TargetParams | None = None,
    *,
    dtype: Any = None,
) -> MtpParams:
    """Load a head; arguments and errors as those of `draft_weights.load_drafter`."""
    hf = read_json(folder / "config.json")
    config = MtpConfig.from_hf(hf)
    if target is not None:
        check_pair(target.config, config, who=str(folder))
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    source = TensorSource(folder, own, ())
    stored = full_dtype(folder, source.peek("mtp.fc.weight"), hf)
    source.use_dtype(dtype, stored if target is None else target.embed.dtype)
    params = _read_head(source, config)
    source.finish()
    return params


def check_head(folder: Path, tensors: Mapping[str, np.ndarray]) -> int:
    """Check every tensor of a head by the headers of its files, and count them.

    Raises:
      ValueError, NotImplementedError: as `load_head`.
    """
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    source = HeaderSource(folder, own, ())
    _read_head(source, read_head_config(folder))
    source.finish()
    return len(own)


def _read_head(source: TensorSource, config: MtpConfig) -> MtpParams:
    c = config.layer
    at = f"{PREFIX}layers.0."
    layer = read_target_layer(source, at, c, is_gdn=False, has_experts=bool(c.moe_layers))
    first, end = c.num_heads * c.head_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim

    def key_value(rows: jax.Array | None) -> jax.Array | None:
        # On the host, to compile nothing.
        return None if rows is None else source.place(np.asarray(rows)[first:end])

    return MtpParams(
        fc=source.put(f"{PREFIX}fc.weight", c.width, 2 * c.width),
        embed_norm=read_norm(source, f"{PREFIX}pre_fc_norm_embedding.weight", c.width, c),
        hidden_norm=read_norm(source, f"{PREFIX}pre_fc_norm_hidden.weight", c.width, c),
        layer=layer,
        kv=source.place(np.asarray(layer.qkv)[first:end]),
        kv_bias=key_value(layer.qkv_bias),
        norm=read_norm(source, f"{PREFIX}norm.weight", c.width, c),
        config=config,
    )
