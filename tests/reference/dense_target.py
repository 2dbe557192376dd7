"""Dense, Qwen3-MoE and Llama targets: whole sequences, no cache (spec/checkpoints.md §5).

Recomputing everything for every call is slow and cannot be stale, which is what an oracle is for.
"""

from typing import NamedTuple

import numpy as np

from tests.reference import layers, moe
from tests.reference.checkpoint import read_config, read_tensors


class TargetOutput(NamedTuple):
    """What one forward gives; `hidden[i]` enters layer i, `hidden[L]` leaves the last one."""

    logits: np.ndarray  # [T, V]
    hidden: list  # L + 1 arrays [T, E], the raw residual stream: no final norm in the last
    normed: np.ndarray  # [T, E] after the final norm, what the head reads

    def features(self, target_layer_ids):
        """[T, M*E]: outputs of the tapped layers side by side; layer i's output is hidden[i+1]."""
        return np.concatenate([self.hidden[i + 1] for i in target_layer_ids], axis=-1)


class DenseTarget:
    """A Qwen3 or Llama checkpoint; they differ in the per-head q and k norms alone."""

    def __init__(self, config, tensors, dtype=np.float64):
        self.config = config
        self.weights = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        tied = config.get("tie_word_embeddings", False)
        self.head = self.embedding if tied else self.weights["lm_head.weight"]
        self.eps = config["rms_norm_eps"]
        self.head_dim = config.get("head_dim") or (
            config["hidden_size"] // config["num_attention_heads"]
        )
        self.rope = layers.rope_frequencies(config, self.head_dim)

    @classmethod
    def load(cls, folder, dtype=np.float64):
        """Read a checkpoint folder."""
        return cls(read_config(folder), read_tensors(folder), dtype)

    def forward(self, ids):
        """ids[T] at positions 0..T-1 -> TargetOutput."""
        positions = np.arange(len(ids))
        x = self.embedding[np.asarray(ids)]
        hidden = [x]
        for i in range(self.config["num_hidden_layers"]):
            x = self._layer(i, x, positions)
            hidden.append(x)
        normed = layers.rms_norm(x, self._scale(self.weights["model.norm.weight"]), self.eps)
        return TargetOutput(normed @ self.head.T, hidden, normed)

    def _layer(self, i, x, positions):
        prefix = f"model.layers.{i}"
        x = x + self._mixer(i, self._norm(x, prefix, "input"), positions)
        return x + self._feed_forward(f"{prefix}.mlp", self._norm(x, prefix, "post_attention"))

    def _mixer(self, i, x, positions):
        return self._attention(f"model.layers.{i}.self_attn", x, positions)

    def _feed_forward(self, prefix, x):
        if moe.is_sparse(self.weights, prefix):
            return moe.feed_forward(x, self.weights, prefix, self.config)
        return layers.swiglu(x, self.weights, prefix)

    def _norm(self, x, prefix, which):
        weight = self.weights[f"{prefix}.{which}_layernorm.weight"]
        return layers.rms_norm(x, self._scale(weight), self.eps)

    def _scale(self, weight):
        """What a norm multiplies by."""
        return weight

    def _attention(self, prefix, x, positions):
        q = layers.rotate(self._heads(x, prefix, "q"), positions, *self.rope)
        k = layers.rotate(self._heads(x, prefix, "k"), positions, *self.rope)
        v = self._heads(x, prefix, "v")
        mixed = layers.attention(q, k, v, layers.visible(positions, positions, is_causal=True))
        return layers.linear(mixed, self.weights, f"{prefix}.o_proj")

    def _heads(self, x, prefix, which):
        """Project to [T, heads, D]; q and k are normed per head where the model has the norm."""
        y = layers.linear(x, self.weights, f"{prefix}.{which}_proj")
        y = y.reshape(len(x), -1, self.head_dim)
        norm = self.weights.get(f"{prefix}.{which}_norm.weight")
        return y if norm is None else layers.rms_norm(y, self._scale(norm), self.eps)
