"""MTP heads as checkpoints: `mtp.*` tensors beside the config of a target of one layer."""

from typing import Any

import numpy as np

from dflash_jax.export_forms import rope_to_hf
from dflash_jax.layer_export import layer_tensors
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.mtp_weights import ARCHITECTURE, PREFIX
from dflash_jax.params import MtpParams


def head_to_hf(config: MtpConfig) -> dict[str, Any]:
    """The `config.json` that `MtpConfig.from_hf` reads back as the same.

    Raises:
      NotImplementedError: the head of a hybrid or mixture-of-experts target.
    """
    c = config.layer
    if c.has_output_gate or c.moe is not None:
        raise NotImplementedError(
            f"MTP head: one of a {c.model_type} target cannot be written, supported are those of "
            "dense targets"
        )
    hf = {
        "architectures": [ARCHITECTURE],
        "model_type": c.model_type,
        "vocab_size": c.vocab,
        "hidden_size": c.width,
        "intermediate_size": c.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "max_position_embeddings": c.max_context,
        "attention_bias": c.has_attention_bias,
        "tie_word_embeddings": c.is_tied,
        **rope_to_hf(c.rope),
        "mtp_num_hidden_layers": 1,
        "num_speculative_tokens": config.max_drafts,
        "mtp_reads_residual": config.reads_residual,
    }
    if MtpConfig.from_hf(hf) != config:
        raise ValueError(f"MTP head: its config.json cannot say {config}")
    return hf


def head_tensors(params: MtpParams) -> dict[str, np.ndarray]:
    """A dense target's head as checkpoint tensors: q, k, v and gate, up apart again."""
    tensors = {
        f"{PREFIX}fc.weight": params.fc,
        f"{PREFIX}pre_fc_norm_embedding.weight": params.embed_norm,
        f"{PREFIX}pre_fc_norm_hidden.weight": params.hidden_norm,
        f"{PREFIX}norm.weight": params.norm,
        **layer_tensors(params.layer, f"{PREFIX}layers.0.", params.config.layer),
    }
    return {name: np.asarray(x) for name, x in tensors.items()}
