"""Qwen3-Next and Qwen3.5 text targets: Gated-DeltaNet layers among gated full attention.

As `dense_target`: the whole sequence at once and no cache, so no state can be stale. Norms are
`1 + w` but for the one inside a Gated-DeltaNet layer (spec/checkpoints.md §5.3).
"""

import numpy as np

from tests.reference import layers
from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.dense_target import DenseTarget
from tests.reference.gated_delta import gdn_layer

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def load_target(folder, dtype=np.float64):
    """The target of a checkpoint folder, dense or hybrid."""
    kind = read_config(folder)["model_type"]
    return (HybridTarget if kind in HYBRIDS else DenseTarget).load(folder, dtype)


class HybridTarget(DenseTarget):
    """A checkpoint of either family; `forward` also leaves a GdnTrace a layer in `traces`."""

    def __init__(self, config, tensors, dtype=np.float64):
        config = {**config, **config.get("text_config", {})}
        tensors = {n.replace("model.language_model.", "model."): x for n, x in tensors.items()}
        super().__init__(config, tensors, dtype)
        rope = config.get("rope_parameters") or {}
        share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
        self.rotary_dim = int(self.head_dim * share)
        self.rope = layers.rope_frequencies(config, self.rotary_dim)
        self.traces = {}

    @classmethod
    def load(cls, folder, dtype=np.float64):
        return cls(read_config(folder), read_tensors(folder), dtype)

    def is_full_attention(self, i):
        """Every fourth layer, or as `layer_types` says."""
        kinds = self.config.get("layer_types")
        if kinds:
            return kinds[i] == "full_attention"
        return (i + 1) % self.config.get("full_attention_interval", 4) == 0

    def _scale(self, weight):
        return 1 + weight

    def _mixer(self, i, x, positions):
        if self.is_full_attention(i):
            return self._attention(f"model.layers.{i}.self_attn", x, positions)
        y, self.traces[i] = gdn_layer(x, self.weights, f"model.layers.{i}.linear_attn", self.config)
        return y

    def _attention(self, prefix, x, positions):
        """Half of the query projection is the gate of the head's output."""
        both = layers.linear(x, self.weights, f"{prefix}.q_proj")
        q, gate = np.split(both.reshape(len(x), -1, 2 * self.head_dim), 2, axis=-1)
        q = layers.rms_norm(q, 1 + self.weights[f"{prefix}.q_norm.weight"], self.eps)
        q = self._rotated(q, positions)
        k = self._rotated(self._heads(x, prefix, "k"), positions)
        v = self._heads(x, prefix, "v")
        mixed = layers.attention(q, k, v, layers.visible(positions, positions, is_causal=True))
        gated = mixed / (1 + np.exp(-gate.reshape(mixed.shape)))
        return layers.linear(gated, self.weights, f"{prefix}.o_proj")

    def _rotated(self, x, positions):
        """Rotate the first `rotary_dim` dims of each head, in halves; the others stay."""
        first, rest = np.split(x, [self.rotary_dim], axis=-1)
        return np.concatenate([layers.rotate(first, positions, *self.rope), rest], axis=-1)
