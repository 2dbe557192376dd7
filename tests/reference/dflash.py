"""DFlash v1, the block-diffusion drafter (spec/drafters.md §1 to §3).

One forward fills a block: row 0 is the anchor (the last token, not yet in the target's cache), the
other rows are mask tokens, and row j predicts the token at its own position. Every layer lets the
block read itself and, through the same k and v projections, the target's features of all tokens
before the anchor. Context keys depend on their token alone, so the reference recomputes them.
"""

from dataclasses import dataclass

import numpy as np

from tests.reference import layers
from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.sampling import draw


@dataclass(frozen=True)
class DraftConfig:
    """The facts of a drafter's config.json that a forward needs (spec/checkpoints.md §1)."""

    raw: dict
    num_layers: int
    block_rows: int
    mask_token_id: int
    target_layer_ids: tuple
    head_dim: int
    eps: float
    windows: tuple  # a layer each: None reads everything
    is_causal: tuple  # a layer each: causal inside the block
    embedding_scale: float
    output_multiplier: float
    softcap: float | None

    @classmethod
    def read(cls, raw):
        """config.json -> DraftConfig."""
        nested = raw.get("dflash_config") or {}

        def fact(key, default=None):
            return nested.get(key, raw.get(key, default))

        return cls(
            raw=raw,
            num_layers=raw["num_hidden_layers"],
            block_rows=fact("block_size"),  # HF counts the anchor row as well
            mask_token_id=fact("mask_token_id"),
            target_layer_ids=tuple(fact("target_layer_ids")),
            head_dim=raw["head_dim"],
            eps=raw["rms_norm_eps"],
            windows=layer_windows(raw, nested),
            is_causal=layer_causality(raw, nested),
            embedding_scale=fact("input_embedding_scale", 1.0),
            output_multiplier=fact("output_multiplier", 1.0) * raw.get("logit_scale", 1.0),
            softcap=fact("final_logit_softcapping"),
        )


def layer_types(raw):
    """What each layer is; a config without `layer_types` slides from `max_window_layers` on."""
    count = raw["num_hidden_layers"]
    if raw.get("layer_types"):
        return raw["layer_types"]
    slides_from = raw.get("max_window_layers", count) if raw.get("use_sliding_window") else count
    return ["sliding_attention" if i >= slides_from else "full_attention" for i in range(count)]


def layer_windows(raw, nested):
    """The window of each layer, None where it reads everything."""
    if nested.get("use_swa"):
        return (nested["swa_window_size"],) * raw["num_hidden_layers"]
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None  # HF's own rule
    window = window or nested.get("swa_window_size")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types(raw))


def layer_causality(raw, nested):
    """As stated for all layers; if nothing is, sliding layers are causal in the block, full not."""
    stated = raw.get("is_causal", nested.get("causal"))
    kinds = layer_types(raw)
    return tuple(kind == "sliding_attention" if stated is None else bool(stated) for kind in kinds)


def identity_conv(x):
    """The place where DFlash2 convolves: v1 passes both the input and the output of a sublayer."""
    return x, lambda z: z


class DFlash:
    """A DFlash checkpoint with its target's embedding and head."""

    def __init__(self, raw_config, tensors, embedding, head, dtype=np.float64):
        self.config = DraftConfig.read(raw_config)
        self.weights = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        self.embedding, self.head = embedding.astype(dtype), head.astype(dtype)
        self.rope = layers.rope_frequencies(raw_config, self.config.head_dim)

    @classmethod
    def load(cls, folder, embedding, head, dtype=np.float64):
        """Read a drafter's folder."""
        return cls(read_config(folder), read_tensors(folder), embedding, head, dtype)

    def fuse(self, features):
        """Target features [S, M*E] -> (fc output, context rows), both [S, E]."""
        fc_out = layers.linear(features, self.weights, "fc")
        return fc_out, layers.rms_norm(fc_out, self.weights["hidden_norm.weight"], self.config.eps)

    def embed(self, ids):
        """Rows of the target's table, scaled by `input_embedding_scale`."""
        return self.embedding[np.asarray(ids)] * self.config.embedding_scale

    def forward(self, block_ids, context, trace=None):
        """One block after `context` [S, E] of the S committed tokens -> final hidden [R, E].

        `trace`, a dict, receives the intermediates under the names of the golden vectors.
        """
        trace = {} if trace is None else trace
        x = trace["noise_embedding"] = self.embed(block_ids)
        for i in range(self.config.num_layers):
            x = self._layer(i, x, context, trace)
            trace[f"layer{i}.out"] = x
        return layers.rms_norm(x, self.weights["norm.weight"], self.config.eps)

    def logits(self, hidden):
        """The target's head, then output multiplier, then soft cap."""
        logits = hidden @ self.head.T * self.config.output_multiplier
        cap = self.config.softcap
        return cap * np.tanh(logits / cap) if cap else logits

    def block_ids(self, anchor, rows):
        """The anchor, then mask tokens."""
        return [int(anchor)] + [self.config.mask_token_id] * (rows - 1)

    def propose(self, tokens, features, num_drafts):
        """Draft `num_drafts` tokens after `tokens`; the last, the anchor, has no features yet."""
        return self.choose(self._draft_hidden(tokens, features, num_drafts), tokens[-1])

    def sample(self, tokens, features, uniforms, process):
        """A draft for each of `uniforms`, drawn from `process` of its row's logits: drafts, q's."""
        hidden = self._draft_hidden(tokens, features, len(uniforms))
        qs = [process(row) for row in self.logits(hidden)]
        return [draw(q, u) for q, u in zip(qs, uniforms, strict=True)], qs

    def _draft_hidden(self, tokens, features, num_drafts):
        """Final hidden [num_drafts, E] of the rows behind the anchor's."""
        _, context = self.fuse(features[: len(tokens) - 1])
        return self.forward(self.block_ids(tokens[-1], num_drafts + 1), context)[1:]

    def choose(self, hidden, anchor):
        """Each row on its own: the best token of its logits. `anchor` is what DFlash2 needs."""
        del anchor
        return [int(token) for token in layers.argmax_lowest(self.logits(hidden))]

    def _conv(self, i, sublayer):
        """(prepare and finish) of layer i's "attention" or "mlp"; nothing in v1."""
        del i, sublayer
        return identity_conv

    def _layer(self, i, x, context, trace):
        prefix = f"layers.{i}"
        prepared, finish = self._conv(i, "attention")(self._norm(x, prefix, "input"))
        x = x + finish(self._attention(i, prepared, context, trace))
        prepared, finish = self._conv(i, "mlp")(self._norm(x, prefix, "post_attention"))
        return x + finish(layers.swiglu(prepared, self.weights, f"{prefix}.mlp"))

    def _norm(self, x, prefix, which):
        weight = self.weights[f"{prefix}.{which}_layernorm.weight"]
        return layers.rms_norm(x, weight, self.config.eps)

    def _attention(self, i, x, context, trace):
        """Block rows [R, E] read themselves and the context rows [S, E] at positions 0..S-1."""
        prefix = f"layers.{i}.self_attn"
        context_positions = np.arange(len(context))
        block_positions = len(context) + np.arange(len(x))
        positions = np.concatenate([context_positions, block_positions])
        stacked = np.concatenate([context, x])  # one projection for both: same weights, same norm
        q = layers.rotate(self._heads(x, prefix, "q"), block_positions, *self.rope)
        k = layers.rotate(self._heads(stacked, prefix, "k"), positions, *self.rope)
        v = self._heads(stacked, prefix, "v")
        allowed = layers.visible(
            block_positions, positions, self.config.is_causal[i], self.config.windows[i]
        )
        mixed = layers.attention(q, k, v, allowed)
        out = layers.linear(mixed, self.weights, f"{prefix}.o_proj")
        trace |= {f"layer{i}.k_cache": k, f"layer{i}.v_cache": v, f"layer{i}.attn_o_proj_out": out}
        return out

    def _heads(self, x, prefix, which):
        """Project to [rows, heads, D]; q and k are normed per head, before the rotation."""
        y = layers.linear(x, self.weights, f"{prefix}.{which}_proj")
        y = y.reshape(len(x), -1, self.config.head_dim)
        norm = self.weights.get(f"{prefix}.{which}_norm.weight")
        return y if norm is None else layers.rms_norm(y, norm, self.config.eps)
