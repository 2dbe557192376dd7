"""Weights as pytrees: what each array is, in the layout it is used in.

Matrices keep the checkpoint's `[out, in]` and act as `y = x @ w.T`, until `turn_weights` makes some
of them a `ByInput`. q, k and v of a layer are one matrix, gate and up another. `config` is the
static field, so jit keys on it.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from dflash_jax.config import DraftConfig, RuleConfig, TargetConfig
from dflash_jax.mtp_config import MtpConfig

# jax.Array | None. Which heads a model has is settled by its config, where the type cannot see it.
MaybeArray = Any


class ByInput(struct.PyTreeNode):
    """A matrix of a layer as `[in, out]`, `y = x @ array` (`weight_layout`)."""

    array: jax.Array  # [in, out]


class ConvParams(struct.PyTreeNode):
    """One grouped dynamic convolution of DFlash2 (spec/drafters.md §4.1)."""

    base: jax.Array  # [2, taps, E]: prepare and finish; tap 0 is the row itself
    projection: jax.Array  # [2 * taps * groups, E]: side slowest, group fastest


class GdnParams(struct.PyTreeNode):
    """A Gated-DeltaNet layer (spec/verify.md §3); Hv value heads of Dv dims, `conv_width` channels.

    `in_proj` is every projection of the input: channels (queries, keys, values), output gate z,
    then the gates b (strength of the write) and a (decay).
    """

    in_proj: jax.Array  # [in_width, E]
    conv: jax.Array  # [taps, conv_width]; the last tap meets the row itself
    a_log: jax.Array  # f32[Hv]
    dt_bias: jax.Array  # f32[Hv]
    norm: jax.Array  # [Dv], a plain weight
    out: jax.Array  # [E, Hv * Dv]


class LayerParams(struct.PyTreeNode):
    """One decoder layer of a target or a drafter.

    With `gdn` there is no attention. With a `router` F counts the columns of all experts side by
    side, the shared one last; `targets.moe` says why. Norms of `1 + w` hold the sum, in f32.
    """

    input_norm: jax.Array  # [E]
    qkv: MaybeArray  # [(H + 2K) * D, E]: query, key, value rows; H * D rows more with a gate
    o: MaybeArray  # [E, H * D]
    post_norm: jax.Array  # [E], before the feed-forward
    gate_up: jax.Array  # [2F, E]: gate rows, up rows
    down: jax.Array  # [E, F]
    q_norm: MaybeArray = None  # [D]
    k_norm: MaybeArray = None  # [D]
    qkv_bias: MaybeArray = None  # [(H + 2K) * D]
    o_bias: MaybeArray = None  # [E]
    attention_conv: ConvParams | None = None
    mlp_conv: ConvParams | None = None
    gdn: GdnParams | None = None
    router: MaybeArray = None  # [experts, E]
    shared_gate: MaybeArray = None  # [1, E]


class TargetParams(struct.PyTreeNode):
    """A target, dense or hybrid."""

    embed: jax.Array  # [V, E]
    layers: tuple[LayerParams, ...]
    norm: jax.Array  # [E]
    head: MaybeArray  # [V, E]; None: tied to `embed`
    config: TargetConfig = struct.field(pytree_node=False)

    @property
    def lm_head(self) -> jax.Array:
        """[V, E]; the embedding when tied."""
        return self.embed if self.head is None else self.head


class SelectorParams(struct.PyTreeNode):
    """DFlash2's candidate selector (spec/drafters.md §4.2)."""

    hidden_projection: jax.Array  # [rank, E]
    predecessor: jax.Array  # [V, rank]
    successor: jax.Array  # [V, rank]


class MarkovParams(struct.PyTreeNode):
    """DSpark's Markov head (spec/drafters.md §5.1): a bias by the token before a row."""

    embed: jax.Array  # [V, rank], looked up by the token before
    out: jax.Array  # [V, rank]
    mix: MaybeArray = None  # gated [rank, E + rank], rnn [3 * rank, 2 * rank + E]; vanilla: None
    mix_bias: MaybeArray = None  # [rank] or [3 * rank]


class ConfidenceParams(struct.PyTreeNode):
    """DSpark's confidence head (spec/drafters.md §5.2)."""

    weight: jax.Array  # [1, E] or [1, E + rank]: hidden columns, then the latent's
    bias: jax.Array  # [1]


class ConfidencePolicy(struct.PyTreeNode):
    """How confidences cut a proposal; data, so that another threshold compiles nothing.

    Without `steps_per_second` drafts before the first below `threshold` are kept. With it the
    paper's scheduler shares the rows of a step among the sequences (`drafters.confidence`).
    """

    threshold: jax.Array  # f32[]
    temperatures: MaybeArray = None  # f32[num_drafts]
    steps_per_second: MaybeArray = None  # f32[N + 1] by rows verified


class DraftParams(struct.PyTreeNode):
    """A DFlash, DFlash2 or DSpark drafter; what is None of its vocabulary is the target's.

    `fused_kv` repeats the key and value rows of every layer's `qkv`, so that all layers' context
    keys come from one product; 2 % of the drafter's bytes buys four launches a step.
    """

    fc: jax.Array  # [E, M * E_target]
    hidden_norm: jax.Array  # [E]
    fused_kv: jax.Array  # [L * 2 * K * D, E]: keys and values of layer 0, of layer 1, ...
    fused_kv_bias: MaybeArray  # [L * 2 * K * D]
    layers: tuple[LayerParams, ...]
    norm: jax.Array  # [E]
    selector: SelectorParams | None
    config: DraftConfig = struct.field(pytree_node=False)
    markov: MarkovParams | None = None
    confidence: ConfidenceParams | None = None
    policy: ConfidencePolicy | None = None  # None: every draft is verified
    embed: MaybeArray = None  # [V, E]
    mask_embed: MaybeArray = None  # [E] in the place of the mask token's row
    head: MaybeArray = None  # [Vd, E]
    d2t: MaybeArray = None  # i32[Vd] target id of each id of the head; None: they are the same


class MtpParams(struct.PyTreeNode):
    """A multi-token-prediction head; embedding and head are the target's.

    Norms of a `1 + w` family hold the sum, as in `LayerParams`. `kv` repeats the key and value rows
    of the layer's `qkv`: committed rows need no others.
    """

    fc: jax.Array  # [E, 2E]: columns of the embedding, then of the hidden row
    embed_norm: jax.Array  # [E]
    hidden_norm: jax.Array  # [E]
    layer: LayerParams
    kv: jax.Array  # [2 * K * D, E]
    kv_bias: MaybeArray  # [2 * K * D]
    norm: jax.Array  # [E]
    config: MtpConfig = struct.field(pytree_node=False)


class RuleParams(struct.PyTreeNode):
    """A drafter that follows a rule: none, prompt lookup, or an oracle.

    An oracle reads its drafts from `tokens` by absolute position and spoils the one at `poison_at`,
    so that exactly `poison_at` drafts are accepted; a value of `num_drafts` spoils none. Both are
    data: every k shares one executable. `inner` is a drafter that runs first, for its cost alone.
    """

    tokens: MaybeArray  # i32[B, S]
    poison_at: MaybeArray  # i32[B]
    inner: DraftParams | MtpParams | None
    config: RuleConfig = struct.field(pytree_node=False)


DrafterParams = DraftParams | MtpParams | RuleParams  # of any drafter there is


class Params(struct.PyTreeNode):
    """A pair: the target that must be matched and the drafter that guesses."""

    target: TargetParams
    draft: DrafterParams

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads."""
        layers = self.draft.config.backbone
        return () if layers is None else layers.target_layer_ids
