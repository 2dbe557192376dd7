"""One speculative decode cycle in PyTorch: weights, caches and the compiled functions over them.

What `bench_torch.py` times and `check_torch_cycle.py` compares with a forward without caches.
Static shapes, caches written in place, no host visit. `torch.compile` sees one function a kind of
work, and `layer_step` serves every layer of target and drafter, so that Inductor compiles it once.
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch_gdn import GdnLayer, GdnState, Rule, mix_recurrent, rule_named
from torch_shapes import Recurrent, Setting, Shapes

RMS_EPS = 1e-6
ROPE_THETA = 1e6
CONV_TAPS, CONV_GROUP, SELECTOR_RANK, SELECTOR_TOP_K = 2, 16, 256, 16
MASKED = -1e30  # finite in bf16: a row without a visible key stays a number


class Conv(NamedTuple):
    base: Tensor  # [2, taps, E]
    projection: Tensor  # [2 * taps * groups, E]


class Layer(NamedTuple):
    qkv: Tensor  # [(H + 2K) * D, E]; H * D more rows make an output gate
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor  # [2F, E]
    down: Tensor
    attention_conv: Conv | None
    mlp_conv: Conv | None


class Drafter(NamedTuple):
    fc: Tensor  # [E, M * E]
    hidden_norm: Tensor
    fused_kv: Tensor  # [L * 2 * K * D, E]
    layers: list[Layer]
    norms: list[Tensor]  # input norm of every layer, then the final one
    selector: tuple[Tensor, Tensor, Tensor] | None  # projection, predecessor, successor


class Target(NamedTuple):
    embed: Tensor
    head: Tensor
    layers: list[Layer | GdnLayer]
    norms: list[Tensor]


class Rows(NamedTuple):
    """Where the rows of a step stand: made once, read by every layer."""

    cos: Tensor  # f32[B, R, 1, rotary]
    sin: Tensor
    sequence: Tensor  # i64[B, 1, 1]
    head: Tensor  # i64[1, K, 1]
    position: Tensor  # i64[B, 1, R]
    last_key: Tensor  # i64[B, R], the last key a row may see
    bias: Tensor  # bf16[B, 1, R or R * G, capacity]


class State(NamedTuple):
    """What a cycle reads and leaves; every tensor keeps its address."""

    anchor: Tensor  # i64[B]
    length: Tensor  # i64[B], committed tokens; the anchor's position
    feature_start: Tensor  # i64[B], position of the first feature row
    features: Tensor  # [B, R, M * E]
    k_cache: list[Tensor]  # [B, K, capacity, D] an attention layer of the target
    v_cache: list[Tensor]
    draft_k: Tensor  # [L, B, K, capacity, D]
    draft_v: Tensor
    recurrent: list[GdnState]  # of the other layers
    kept: Tensor  # i64[B] rows of the last step that are committed, at least 1


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS)
    return weight * normed.to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of the first dims: x [B, R, heads, D], cos and sin f32[B, R, 1, rotary]."""
    wide, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    wide = wide.float()
    low, high = wide.chunk(2, -1)
    turned = (wide * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def rope_tables(position: Tensor, rotary: int) -> tuple[Tensor, Tensor]:
    step = torch.arange(0, rotary, 2, device=position.device, dtype=torch.float32)
    angle = position[..., None].float() * ROPE_THETA ** (-step / rotary)
    angle = torch.cat((angle, angle), -1)[:, :, None]
    return angle.cos(), angle.sin()


def locate_rows(
    start: Tensor, rows: int, is_causal: bool, fold: int, capacity: int, model: Shapes, dtype: Any
) -> Rows:
    """The rows at start .. start + rows - 1; `fold` copies of each row share a mask row."""
    offset = torch.arange(rows, device=start.device)
    position = start[:, None] + offset  # [B, R]
    cos, sin = rope_tables(position, model.rotary)
    last = position if is_causal else (start[:, None] + rows - 1).expand(-1, rows).contiguous()
    hidden = torch.arange(capacity, device=start.device) > last[..., None]  # [B, R, S]
    bias = torch.where(hidden, MASKED, 0.0).to(dtype)[:, None]
    return Rows(
        cos,
        sin,
        torch.arange(start.shape[0], device=start.device)[:, None, None],
        torch.arange(model.kv_heads, device=start.device)[None, :, None],
        position[:, None],
        last,
        bias.repeat_interleave(fold, dim=2),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, kind: str) -> Tensor:
    """q [B, R, H, D] over k, v [B, K, S, D] -> [B, R, H * D]."""
    batch, num_rows, heads, dim = q.shape
    if kind == "fold":  # the query heads of a kv head as rows: every key is read once
        group = heads // k.shape[1]
        q = q.view(batch, num_rows, k.shape[1], group, dim).transpose(1, 2)
        q = q.reshape(batch, k.shape[1], num_rows * group, dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.bias)
        out = out.view(batch, k.shape[1], num_rows, group, dim)
        return out.transpose(1, 2).reshape(batch, num_rows, heads * dim)
    q = q.transpose(1, 2)
    if kind == "flex":
        last_key = rows.last_key

        def visible(score, b, h, q_idx, kv_idx):
            return torch.where(kv_idx <= last_key[b, q_idx], score, -float("inf"))

        out = flex_attention(q, k, v, score_mod=visible, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.bias, enable_gqa=True)
    return out.transpose(1, 2).reshape(batch, num_rows, heads * dim)


def mix_rows(x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
    """One grouped causal convolution: dynamic [B, R, taps, groups], base [taps, E]."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for tap in range(CONV_TAPS):
        weight = base[tap].float() + dynamic[:, :, tap].float().repeat_interleave(CONV_GROUP, -1)
        out += weight * F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]].float()
    return out.to(x.dtype)


def conv_weights(x: Tensor, conv: Conv) -> Tensor:
    return F.linear(x, conv.projection).view(*x.shape[:2], 2, CONV_TAPS, -1)


def layer_step(
    x: Tensor,
    normed: Tensor,
    layer: Layer,
    next_norm: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Rows,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """One layer, target's or drafter's: residual and normed rows in, the same out for the next."""
    batch, num_rows, _ = x.shape
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    if layer.attention_conv is not None:
        mix = conv_weights(normed, layer.attention_conv)
        normed = mix_rows(normed, mix[:, :, 0], layer.attention_conv.base[0])
    qkv = F.linear(normed, layer.qkv).view(batch, num_rows, -1, dim)
    heads = layer.out.shape[1] // dim
    gates = qkv.shape[2] - heads - 2 * kv_heads
    q, k, v, gate = qkv.split((heads, kv_heads, kv_heads, gates), dim=2)
    q = rope(rms_norm(q, layer.q_norm), rows.cos, rows.sin)
    k = rope(rms_norm(k, layer.k_norm), rows.cos, rows.sin)
    where = (rows.sequence, rows.head, rows.position)
    k_cache.index_put_(where, k.transpose(1, 2))
    v_cache.index_put_(where, v.transpose(1, 2))
    out = attend(q, k_cache, v_cache, rows, kind)
    if gates:
        out = out * gate.flatten(2).float().sigmoid().to(out.dtype)
    out = F.linear(out, layer.out)
    if layer.attention_conv is not None:
        out = mix_rows(out, mix[:, :, 1], layer.attention_conv.base[1])
    x = x + out
    normed = rms_norm(x, layer.post_norm)
    if layer.mlp_conv is not None:
        mix = conv_weights(normed, layer.mlp_conv)
        normed = mix_rows(normed, mix[:, :, 0], layer.mlp_conv.base[0])
    gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
    out = F.linear(F.silu(gate) * up, layer.down)
    if layer.mlp_conv is not None:
        out = mix_rows(out, mix[:, :, 1], layer.mlp_conv.base[1])
    x = x + out
    return x, rms_norm(x, next_norm)


def recurrent_step(
    x: Tensor,
    normed: Tensor,
    layer: GdnLayer,
    next_norm: Tensor,
    carried: GdnState,
    kept: Tensor,
    c: Recurrent,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """`layer_step` of a Gated-DeltaNet layer."""
    x = x + mix_recurrent(normed, layer, carried, kept, c, rule)
    gate, up = F.linear(rms_norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, layer.down)
    return x, rms_norm(x, next_norm)


def write_context(drafter: Drafter, state: State) -> None:
    """Keys and values of the feature rows in every drafter layer.

    Rows past the accepted ones are written too: the block's own rows overwrite them.
    """
    layers, batch, kv_heads, _, dim = state.draft_k.shape
    num_rows = state.features.shape[1]
    ctx = rms_norm(F.linear(state.features, drafter.fc), drafter.hidden_norm)
    kv = F.linear(ctx, drafter.fused_kv).view(batch, num_rows, layers, 2, kv_heads, dim)
    position = state.feature_start[:, None] + torch.arange(num_rows, device=kv.device)
    cos, sin = rope_tables(position, dim)
    k_norm = torch.stack([layer.k_norm for layer in drafter.layers])[:, None]  # [L, 1, D]
    k = rope(rms_norm(kv[:, :, :, 0], k_norm).flatten(2, 3), cos, sin)
    k = k.view(batch, num_rows, layers, kv_heads, dim)
    axis = lambda size, shape: torch.arange(size, device=kv.device).view(shape)
    where = (
        axis(layers, (-1, 1, 1, 1)),
        axis(batch, (1, -1, 1, 1)),
        axis(kv_heads, (1, 1, -1, 1)),
        position[None, :, None],
    )
    state.draft_k.index_put_(where, k.permute(2, 0, 3, 1, 4))
    state.draft_v.index_put_(where, kv[:, :, :, 1].permute(2, 0, 3, 1, 4))


def start_rows(
    tokens: Tensor, embed: Tensor, norm: Tensor, start: Tensor, locate: Callable[..., Rows]
) -> tuple[Tensor, Tensor, Rows]:
    x = embed[tokens]
    return x, rms_norm(x, norm), locate(start)


def row_argmax(logits: Tensor) -> Tensor:
    """argmax over the last axis in two levels, lowest id on ties: one level uses a CTA a row."""
    pieces = next(n for n in (128, 64, 32, 16, 1) if logits.shape[-1] % n == 0)
    best, inner = logits.unflatten(-1, (pieces, -1)).max(-1)
    piece = best.argmax(-1, keepdim=True)
    width = logits.shape[-1] // pieces
    return (piece * width + inner.gather(-1, piece)).squeeze(-1)


def choose_drafts(hidden: Tensor, head: Tensor, anchor: Tensor, drafter: Drafter) -> Tensor:
    """The drafts of rows 1..: argmax, or DFlash2's walk over the 16 best of each row."""
    hidden = hidden[:, 1:]
    logits = F.linear(hidden, head)
    if drafter.selector is None:
        return row_argmax(logits)
    projection, predecessor, successor = drafter.selector
    unary, candidate = torch.topk(logits.float(), SELECTOR_TOP_K, dim=-1)  # [B, R-1, C]
    before = torch.cat((anchor[:, None, None].expand(-1, 1, SELECTOR_TOP_K), candidate[:, :-1]), 1)
    left = predecessor[before] * F.linear(hidden, projection)[:, :, None]
    edge = torch.matmul(left, successor[candidate].transpose(-1, -2)).float()
    choice = (unary[:, :, None] + edge).argmax(-1)  # [B, R-1, C], for each predecessor
    chosen = torch.zeros_like(anchor)[:, None]
    drafts = []
    for row in range(candidate.shape[1]):
        chosen = choice[:, row].gather(1, chosen)
        drafts.append(candidate[:, row].gather(1, chosen))
    return torch.cat(drafts, 1)


def accept(
    normed: Tensor, head: Tensor, tokens: Tensor, taps: list[Tensor], state: State, forced: Tensor
) -> Tensor:
    """Acceptance and the new state; `forced` >= 0 replaces the number that was accepted."""
    chosen = row_argmax(F.linear(normed, head))  # [B, R]
    matches = (tokens[:, 1:] == chosen[:, :-1]).long()
    accepted = torch.where(forced >= 0, forced, matches.cumprod(1).sum(1))
    state.features.copy_(torch.cat(taps, -1))
    state.feature_start.copy_(state.length)
    state.anchor.copy_(chosen.gather(1, accepted[:, None])[:, 0])
    state.length.add_(accepted + 1)
    state.kept.copy_(accepted + 1)
    return chosen


def random_tensor(*shape: int, like: Any, scale: float = 0.02) -> Tensor:
    device, dtype = like
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, scale)


def norm_weight(size: int, like: Any) -> Tensor:
    return 1.0 + random_tensor(size, like=like)


def make_conv(model: Shapes, like: Any) -> Conv:
    groups = model.width // CONV_GROUP
    base = random_tensor(2, CONV_TAPS, model.width, like=like)
    base[:, 0] += 1.0
    return Conv(base, random_tensor(2 * CONV_TAPS * groups, model.width, like=like, scale=0.01))


def make_layer(model: Shapes, like: Any, has_conv: bool) -> Layer:
    width, dim = model.width, model.head_dim
    qkv_rows = (model.heads * (1 + model.has_gate) + 2 * model.kv_heads) * dim
    return Layer(
        random_tensor(qkv_rows, width, like=like),
        norm_weight(dim, like),
        norm_weight(dim, like),
        random_tensor(width, model.heads * dim, like=like),
        norm_weight(width, like),
        random_tensor(2 * model.ffn, width, like=like),
        random_tensor(width, model.ffn, like=like),
        make_conv(model, like) if has_conv else None,
        make_conv(model, like) if has_conv else None,
    )


def make_gdn_layer(model: Shapes, c: Recurrent, like: Any) -> GdnLayer:
    width, exact = model.width, (like[0], torch.float32)
    return GdnLayer(
        random_tensor(c.in_width, width, like=like),
        random_tensor(c.taps, c.conv_width, like=like, scale=0.3),
        random_tensor(c.value_heads, like=exact),
        norm_weight(c.value_heads, exact),
        norm_weight(c.value_dim, like),
        random_tensor(width, c.value_width, like=like),
        norm_weight(width, like),
        random_tensor(2 * model.ffn, width, like=like),
        random_tensor(width, model.ffn, like=like),
    )


def make_target(model: Shapes, like: Any) -> Target:
    embed = random_tensor(model.vocab, model.width, like=like)
    return Target(
        embed,
        embed if model.is_tied else random_tensor(model.vocab, model.width, like=like),
        [
            make_gdn_layer(model, model.recurrent, like)
            if model.recurrent is not None and model.is_recurrent(i)
            else make_layer(model, like, False)
            for i in range(model.layers)
        ],
        [norm_weight(model.width, like) for _ in range(model.layers + 1)],
    )


def make_drafter(model: Shapes, like: Any, kind: str) -> Drafter:
    model = model.drafter
    layers = [make_layer(model, like, kind == "dflash2") for _ in range(model.draft_layers)]
    kv_rows = 2 * model.kv_heads * model.head_dim
    shapes = [(SELECTOR_RANK, model.width)] + 2 * [(model.vocab, SELECTOR_RANK)]
    selector = tuple(random_tensor(*shape, like=like) for shape in shapes)
    return Drafter(
        random_tensor(model.width, len(model.taps) * model.width, like=like),
        norm_weight(model.width, like),
        torch.cat([layer.qkv[-kv_rows:] for layer in layers]),
        layers,
        [norm_weight(model.width, like) for _ in range(model.draft_layers + 1)],
        selector if kind == "dflash2" else None,
    )


def make_state(setting: Setting, like: Any) -> State:
    model, batch = setting.model, setting.batch
    device, _ = like
    cache = (batch, model.kv_heads, setting.capacity, model.head_dim)
    drafter = model.drafter
    integers = lambda value: torch.full((batch,), value, device=device, dtype=torch.int64)
    draft_layers = model.draft_layers if setting.drafter != "none" else 0
    draft_cache = (draft_layers, batch, drafter.kv_heads, setting.capacity, drafter.head_dim)
    feature_width = len(model.taps) * model.width
    return State(
        integers(7),
        integers(setting.context),
        integers(max(setting.context - setting.rows, 0)),
        random_tensor(batch, setting.rows, feature_width, like=like, scale=1.0),
        [random_tensor(*cache, like=like, scale=1.0) for _ in range(model.attention_layers)],
        [random_tensor(*cache, like=like, scale=1.0) for _ in range(model.attention_layers)],
        random_tensor(*draft_cache, like=like, scale=1.0),
        random_tensor(*draft_cache, like=like, scale=1.0),
        [
            make_gdn_state(setting, model.recurrent, like)
            for i in range(model.layers)
            if model.recurrent is not None and model.is_recurrent(i)
        ],
        integers(1),
    )


def make_gdn_state(setting: Setting, c: Recurrent, like: Any) -> GdnState:
    """A state of one layer, behind every row of a step that never was."""
    states = (setting.batch, setting.rows, c.value_heads, c.key_dim, c.value_dim)
    window = (setting.batch, c.taps - 1 + setting.rows, c.conv_width)
    exact = (like[0], torch.float32)
    return GdnState(random_tensor(*states, like=exact), random_tensor(*window, like=like))


@dataclass
class Cycle:
    """One cycle over fixed tensors: `propose` fills `tokens`, `verify` moves the state on."""

    setting: Setting
    target: Target
    drafter: Drafter | None
    state: State
    kind: str
    tokens: Tensor  # i64[B, R], anchor and drafts
    mask_row: Tensor  # i64[B, R - 1]
    forced: Tensor  # i64[B]
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]

    def __post_init__(self) -> None:
        self.layer = self.compile(layer_step)
        self.recurrent = self.compile(recurrent_step)
        self.rule = rule_named(self.setting.recurrence)
        self.begin = self.compile(start_rows)
        self.context = self.compile(write_context)
        self.choose = self.compile(choose_drafts)
        self.accept = self.compile(accept)
        self.locate_draft = self._locate(self.setting.model.drafter, is_causal=False)
        self.locate_target = self._locate(self.setting.model, is_causal=True)

    def _locate(self, model: Shapes, is_causal: bool) -> Callable[[Tensor], Rows]:
        fold = model.heads // model.kv_heads if self.kind == "fold" else 1
        rows, capacity, dtype = self.setting.rows, self.setting.capacity, self.target.embed.dtype

        def locate(start: Tensor) -> Rows:
            return locate_rows(start, rows, is_causal, fold, capacity, model, dtype)

        return locate

    def propose(self) -> None:
        state, drafter, target = self.state, self.drafter, self.target
        if drafter is None:
            self.tokens[:, 0].copy_(state.anchor)
            return
        self.context(drafter, state)
        tokens = torch.cat((state.anchor[:, None], self.mask_row), 1)
        x, normed, rows = self.begin(
            tokens, target.embed, drafter.norms[0], state.length, self.locate_draft
        )
        for i, layer in enumerate(drafter.layers):
            caches = (state.draft_k[i], state.draft_v[i])
            x, normed = self.layer(x, normed, layer, drafter.norms[i + 1], *caches, rows, self.kind)
        drafts = self.choose(normed, target.head, state.anchor, drafter)
        self.tokens.copy_(torch.cat((state.anchor[:, None], drafts), 1))

    def verify(self) -> Tensor:
        state, target = self.state, self.target
        x, normed, rows = self.begin(
            self.tokens, target.embed, target.norms[0], state.length, self.locate_target
        )
        taps, model = [], self.setting.model
        caches = iter(zip(state.k_cache, state.v_cache, strict=True))
        carried = iter(state.recurrent)
        for i, layer in enumerate(target.layers):
            norm = target.norms[i + 1]
            if isinstance(layer, GdnLayer):
                last = (next(carried), state.kept, model.recurrent, self.rule)
                x, normed = self.recurrent(x, normed, layer, norm, *last)
            else:
                x, normed = self.layer(x, normed, layer, norm, *next(caches), rows, self.kind)
            if i in model.taps:
                taps.append(x)
        return self.accept(normed, target.head, self.tokens, taps, state, self.forced)

    def run(self) -> None:
        self.propose()
        self.verify()

    def rewind(self) -> None:
        """Back to the asked context, so that every sample reads the same number of keys."""
        self.state.length.fill_(self.setting.context)
        self.state.feature_start.fill_(max(self.setting.context - self.setting.rows, 0))


def compiler(mode: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    if mode == "eager":
        return lambda function: function
    chosen = None if mode == "default" else mode
    return lambda function: torch.compile(function, fullgraph=True, dynamic=False, mode=chosen)


def make_cycle(setting: Setting, like: Any, kind: str, compile: Any, forced: int) -> Cycle:
    device, _ = like
    integers = lambda value, *shape: torch.full(shape, value, device=device, dtype=torch.int64)
    model, batch, rows = setting.model, setting.batch, setting.rows
    return Cycle(
        setting,
        make_target(model, like),
        None if setting.drafter == "none" else make_drafter(model, like, setting.drafter),
        make_state(setting, like),
        kind,
        integers(3, batch, rows),
        integers(model.vocab - 2, batch, rows - 1),
        integers(forced, batch),
        compile,
    )
