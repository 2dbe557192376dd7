"""The multi-token-prediction head of Qwen3-Next and Qwen3.5, and of our own (spec/drafters.md §6).

Row t joins the target's final-norm hidden of token t with the embedding of token t + 1, runs one
full-attention decoder layer over the rows so far, and says what stands at t + 2. The first draft
comes from the last committed row, with the anchor as its next token; each further row takes the
draft before it and the head's own output.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference import layers


@dataclass(frozen=True)
class LayerKind:
    """What sets one family's full-attention layer apart."""

    norm_offset: float = 0.0  # 1 where norms scale by 1 + weight
    is_gated: bool = False  # q_proj yields query and gate, head by head
    rotary_factor: float = 1.0  # part of a head that is rotated
    experts_per_token: int = 0  # 0: a dense feed-forward
    renormalise: bool = True  # expert weights sum to one over the chosen ones

    @classmethod
    def read(cls, config):
        """A target's config.json, the text half of a nested one."""
        config = {**config, **config.get("text_config", {})}
        if not str(config["model_type"]).startswith(("qwen3_next", "qwen3_5")):
            return cls()
        rope = config.get("rope_parameters") or {}
        has_experts = config.get("num_experts", 0) > 0
        return cls(
            norm_offset=1.0,
            is_gated=True,
            rotary_factor=rope.get(
                "partial_rotary_factor", config.get("partial_rotary_factor", 0.25)
            ),
            experts_per_token=config["num_experts_per_tok"] if has_experts else 0,
            renormalise=config.get("norm_topk_prob", True),
        )


class MtpHead:
    """The `mtp.*` tensors of a checkpoint with its target's embedding and head."""

    def __init__(self, config, tensors, embedding, head, dtype=np.float64):
        self.kind = LayerKind.read(config)
        self.config = {**config, **config.get("text_config", {})}
        self.weights = {
            name.removeprefix("mtp."): x.astype(dtype)
            for name, x in tensors.items()
            if name.startswith("mtp.")
        }
        self.embedding, self.head = embedding.astype(dtype), head.astype(dtype)
        self.eps, self.head_dim = self.config["rms_norm_eps"], self.config["head_dim"]
        rotated = int(self.head_dim * self.kind.rotary_factor)
        self.rope = layers.rope_frequencies(self.config, rotated)

    def join(self, hidden, next_ids):
        """fc([norm(embedding of the next token), norm(hidden)]): [T, E]."""
        embedded = self._norm(self.embedding[np.asarray(next_ids)], "pre_fc_norm_embedding")
        normed = self._norm(hidden, "pre_fc_norm_hidden")
        return layers.linear(np.concatenate([embedded, normed], axis=-1), self.weights, "fc")

    def forward(self, hidden, next_ids):
        """Rows at positions 0.. of hidden[T, E] and next_ids[T] -> normed output [T, E]."""
        x = self.join(hidden, next_ids)
        at = "layers.0"
        x = x + self._attention(self._norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
        x = x + self._feed_forward(self._norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp")
        return self._norm(x, "norm")

    def logits(self, out):
        """The target's head."""
        return out @ self.head.T

    def draft(self, hidden, tokens, num_drafts):
        """Greedy drafts after `tokens` by hidden[len(tokens) - 1, E] of all but the anchor.

        Returns:
          drafts, the head's outputs behind them [num_drafts, E], and their logits.
        """
        hidden, next_ids = np.asarray(hidden), [int(token) for token in tokens[1:]]
        drafts, outs = [], []
        for _ in range(num_drafts):
            outs.append(self.forward(hidden, next_ids)[-1])
            drafts.append(int(layers.argmax_lowest(self.logits(outs[-1]))))
            hidden, next_ids = np.vstack([hidden, outs[-1]]), [*next_ids, drafts[-1]]
        return drafts, np.array(outs), self.logits(np.array(outs))

    def _norm(self, x, name):
        return layers.rms_norm(x, self.kind.norm_offset + self.weights[f"{name}.weight"], self.eps)

    def _attention(self, x, at):
        positions = np.arange(len(x))
        q = layers.linear(x, self.weights, f"{at}.q_proj")
        gate = None
        if self.kind.is_gated:
            q, gate = np.split(q.reshape(len(x), -1, 2 * self.head_dim), 2, axis=-1)
            gate = gate.reshape(len(x), -1)
        q = self._rotate(self._heads(q, f"{at}.q_norm"), positions)
        k = layers.linear(x, self.weights, f"{at}.k_proj")
        k = self._rotate(self._heads(k, f"{at}.k_norm"), positions)
        v = layers.linear(x, self.weights, f"{at}.v_proj").reshape(len(x), -1, self.head_dim)
        mixed = layers.attention(q, k, v, layers.visible(positions, positions, is_causal=True))
        if gate is not None:
            mixed = mixed / (1 + np.exp(-gate))
        return layers.linear(mixed, self.weights, f"{at}.o_proj")

    def _heads(self, x, norm):
        """[T, heads, D], normed per head where the layer has the norm."""
        x = x.reshape(len(x), -1, self.head_dim)
        return self._norm(x, norm) if f"{norm}.weight" in self.weights else x

    def _rotate(self, x, positions):
        """Rotate the first part of each head; the rest carries no position."""
        rotated = 2 * len(self.rope[0])
        turned = layers.rotate(x[..., :rotated], positions, *self.rope)
        return np.concatenate([turned, x[..., rotated:]], axis=-1)

    def _feed_forward(self, x, at):
        if not self.kind.experts_per_token:
            return layers.swiglu(x, self.weights, at)
        return np.stack([self._mixture(row, at) for row in x])

    def _mixture(self, row, at):
        """One row through its best experts, and through the shared one by its own gate."""
        chances = layers.softmax(layers.linear(row, self.weights, f"{at}.gate"))
        best = np.argsort(-chances, kind="stable")[: self.kind.experts_per_token]
        shares = chances[best] / (chances[best].sum() if self.kind.renormalise else 1)
        out = sum(
            share * layers.swiglu(row, self.weights, f"{at}.experts.{expert}")
            for share, expert in zip(shares, best, strict=True)
        )
        gate = layers.linear(row, self.weights, f"{at}.shared_expert_gate")
        shared = layers.swiglu(row, self.weights, f"{at}.shared_expert")
        return out + shared / (1 + np.exp(-gate))
