"""Compare the PyTorch cycle with a plain forward without caches, on shapes that a CPU runs.

python scripts/check_torch_cycle.py --drafter dflash2 --attention fold

`--shapes tiny-hybrid` does so with Gated-DeltaNet layers, `--package` compares that target with
`dflash_jax`'s as well. `TRITON_INTERPRET=1` runs `--recurrence triton` without a GPU.
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_cycle import (
    SELECTOR_TOP_K,
    Cycle,
    Layer,
    compiler,
    conv_weights,
    make_cycle,
    mix_rows,
    rms_norm,
    rope,
    rope_tables,
)
from torch_gdn import GdnLayer
from torch_shapes import Recurrent, Setting, Shapes


def naive_forward(
    embedded: Tensor,
    layers: Sequence[Layer | GdnLayer],
    norms: list[Tensor],
    context: Tensor | None,
    model: Shapes,
) -> tuple[list[Tensor], Tensor]:
    """Rows [T, E] through the layers with plain attention; returns layer outputs and final rows.

    Without `context` rows are causal. With it, its [S, E] rows after fc and norm, at positions
    0..S-1, are extra keys of every layer; the rows stand at S.. and see everything.
    """
    x, outputs = embedded[None], []
    before = 0 if context is None else context.shape[0]
    total = before + embedded.shape[0]
    cos, sin = rope_tables(torch.arange(total)[None], model.rotary)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    for layer, norm in zip(layers, norms[:-1], strict=True):
        a = rms_norm(x, norm)
        if isinstance(layer, GdnLayer):
            assert model.recurrent is not None
            x = x + naive_recurrent(a[0], layer, model.recurrent)
            gate, up = F.linear(rms_norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
            outputs.append(x[0])
            continue
        if layer.attention_conv is not None:
            mix = conv_weights(a, layer.attention_conv)
            a = mix_rows(a, mix[:, :, 0], layer.attention_conv.base[0])
        rows = a if context is None else torch.cat((context[None], a), 1)
        dim = layer.q_norm.shape[0]
        heads = layer.out.shape[1] // dim
        qkv = F.linear(rows, layer.qkv).view(1, total, -1, dim)
        kv_heads = model.kv_heads
        q, k, v, gate = qkv.split((heads, kv_heads, kv_heads, heads * model.has_gate), dim=2)
        q = rope(rms_norm(q, layer.q_norm), cos, sin)[:, before:]
        k = rope(rms_norm(k, layer.k_norm), cos, sin)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
        scores = torch.einsum("brhd,bshd->bhrs", q, k) / dim**0.5
        if context is None:
            future = torch.ones(total, total, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -float("inf"))
        out = torch.einsum("bhrs,bshd->brhd", scores.softmax(-1), v).flatten(2)
        if model.has_gate:
            out = out * gate.flatten(2).sigmoid()
        out = F.linear(out, layer.out)
        if layer.attention_conv is not None:
            out = mix_rows(out, mix[:, :, 1], layer.attention_conv.base[1])
        x = x + out
        a = rms_norm(x, layer.post_norm)
        if layer.mlp_conv is not None:
            mix = conv_weights(a, layer.mlp_conv)
            a = mix_rows(a, mix[:, :, 0], layer.mlp_conv.base[0])
        gate, up = F.linear(a, layer.gate_up).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, layer.down)
        if layer.mlp_conv is not None:
            out = mix_rows(out, mix[:, :, 1], layer.mlp_conv.base[1])
        x = x + out
        outputs.append(x[0])
    return outputs, rms_norm(x, norms[-1])[0]


def naive_recurrent(a: Tensor, layer: GdnLayer, c: Recurrent) -> Tensor:
    """What a Gated-DeltaNet layer adds to normed rows [T, E] of a text from its start."""
    projected, width = F.linear(a, layer.in_proj), c.conv_width
    z, b, decay = projected[:, width:].split((c.value_width, c.value_heads, c.value_heads), -1)
    taps = layer.conv.T[:, None]  # [C, 1, taps]
    padded = F.pad(projected[:, :width].T, (c.taps - 1, 0))
    mixed = F.silu(F.conv1d(padded[None], taps, groups=width)[0].T)
    keys = c.key_heads * c.key_dim
    q, k, v = mixed.split((keys, keys, c.value_width), -1)
    q, k = (x.view(len(a), c.key_heads, c.key_dim) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    share = c.value_heads // c.key_heads
    q, k = (x.repeat_interleave(share, 1) for x in (q / c.key_dim**0.5, k))
    v = v.view(len(a), c.value_heads, c.value_dim)
    kept = torch.exp(-layer.a_log.exp() * F.softplus(decay + layer.dt_bias))
    state = torch.zeros(c.value_heads, c.key_dim, c.value_dim)
    rows = []
    for t in range(len(a)):
        state = state * kept[t][:, None, None]
        error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], b[t].sigmoid()[:, None] * error)
        rows.append(torch.einsum("hkv,hk->hv", state, q[t]))
    out = rms_norm(torch.stack(rows), layer.norm) * F.silu(z.view(len(a), c.value_heads, -1))
    return F.linear(out.flatten(1), layer.out)


def naive_drafts(cycle: Cycle, context: Tensor, anchor: int) -> list[int]:
    """Drafts of one sequence from its features [S, M * E], by the definition."""
    drafter, target, model = cycle.drafter, cycle.target, cycle.setting.model.drafter
    assert drafter is not None
    rows = rms_norm(F.linear(context, drafter.fc), drafter.hidden_norm)
    block = torch.cat((torch.tensor([anchor]), cycle.mask_row[0]))
    _, hidden = naive_forward(target.embed[block], drafter.layers, drafter.norms, rows, model)
    logits = F.linear(hidden[1:], target.head)
    if drafter.selector is None:
        return logits.argmax(-1).tolist()
    projection, predecessor, successor = drafter.selector
    drafts, last = [], anchor
    for row, scores in zip(hidden[1:], logits, strict=True):
        unary, ids = torch.topk(scores, SELECTOR_TOP_K)
        edge = successor[ids] @ (predecessor[last] * F.linear(row, projection))
        last = int(ids[(unary + edge).argmax()])
        drafts.append(last)
    return drafts


def naive_features(cycle: Cycle, tokens: list[int]) -> Tensor:
    """Features [T, M * E] of committed tokens, by a forward over all of them."""
    outputs, _ = naive_target(cycle, tokens)
    return torch.cat([outputs[i] for i in cycle.setting.model.taps], -1)


def naive_target(cycle: Cycle, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    target, model = cycle.target, cycle.setting.model
    embedded = target.embed[torch.tensor(tokens)]
    return naive_forward(embedded, target.layers, target.norms, None, model)


def check(setting: Setting, kind: str, library: bool) -> int:
    """Run cycles from an empty cache in f32; every choice must be the naive forward's.

    Returns:
      Rows of the target that were compared.
    """
    torch.manual_seed(1)
    like = (torch.device("cpu"), torch.float32)
    cycle = make_cycle(setting, like, kind, compiler(setting.mode), -1)
    state, rows, compared = cycle.state, setting.rows, 0
    state.length.zero_()
    state.feature_start.zero_()
    for carried in state.recurrent:
        carried.states[:, 0].zero_()
        carried.window[:, : rows + 1].zero_()
    streams = [[int(token)] for token in state.anchor]
    for number in range(4):
        # The drafts accepted by a random target are none, so the first cycles force some.
        cycle.forced.fill_((3, 0, rows - 1, -1)[number])
        if number:
            cycle.propose()
            for b, stream in enumerate(streams):
                context = naive_features(cycle, stream[:-1])
                wanted = naive_drafts(cycle, context, stream[-1])
                assert cycle.tokens[b, 1:].tolist() == wanted, (number, b, cycle.tokens[b], wanted)
        else:
            drafts = torch.randint(0, setting.model.vocab, (setting.batch, rows - 1))
            cycle.tokens.copy_(torch.cat((state.anchor[:, None], drafts), 1))
        tokens, lengths = cycle.tokens.tolist(), state.length.tolist()
        chosen = cycle.verify().tolist()
        for b, stream in enumerate(streams):
            full = stream[:-1] + tokens[b]
            _, hidden = naive_target(cycle, full)
            wanted = F.linear(hidden[-rows:], cycle.target.head).argmax(-1).tolist()
            assert chosen[b] == wanted, (number, b, chosen[b], wanted)
            if library:
                from torch_library import forward

                torch.testing.assert_close(
                    forward(cycle.target, cycle.setting.model, full), hidden, rtol=1e-4, atol=1e-4
                )
            taken = int(state.length[b]) - lengths[b]
            stream[-1:] = tokens[b][:taken] + [chosen[b][taken - 1]]
            assert stream[-1] == int(state.anchor[b])
            compared += rows
    return compared


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--drafter", choices=("dflash", "dflash2"), default="dflash")
    parser.add_argument("--attention", choices=("fold", "gqa", "flex"), default="fold")
    parser.add_argument("--mode", choices=("eager", "default"), default="eager")
    parser.add_argument("--shapes", choices=("tiny", "tiny-hybrid"), default="tiny")
    parser.add_argument("--recurrence", choices=("unrolled", "triton"), default="unrolled")
    parser.add_argument("--package", action="store_true", help="hybrid: as in dflash_jax, too")
    args = parser.parse_args(argv)
    if args.package and args.shapes != "tiny-hybrid":
        parser.error("--package compares hybrid targets: wanted --shapes tiny-hybrid")
    setting = Setting(args.shapes, 2, 32, 8, args.drafter, 3, args.mode, args.recurrence)
    with torch.no_grad():
        compared = check(setting, args.attention, args.package)
    told = [args.shapes, args.drafter, args.attention, args.mode]
    told += [args.recurrence] * (args.shapes == "tiny-hybrid")
    print(
        f"{', '.join(told)}: {compared} rows as in a plain forward"
        + " and the library" * args.package
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
