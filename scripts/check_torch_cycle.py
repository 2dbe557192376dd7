"""Compare the PyTorch cycle with a plain forward without caches, on shapes that a CPU runs.

python scripts/check_torch_cycle.py --drafter dflash2 --attention fold
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_cycle import (
    SELECTOR_TOP_K,
    Cycle,
    Layer,
    Setting,
    compiler,
    conv_weights,
    make_cycle,
    mix_rows,
    rms_norm,
    rope,
    rope_tables,
)


def naive_forward(
    embedded: Tensor, layers: list[Layer], norms: list[Tensor], context: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Rows [T, E] through the layers with plain attention; returns layer outputs and final rows.

    Without `context` rows are causal. With it, its [S, E] rows after fc and norm, at positions
    0..S-1, are extra keys of every layer; the rows stand at S.. and see everything.
    """
    x, outputs = embedded[None], []
    before = 0 if context is None else context.shape[0]
    total = before + embedded.shape[0]
    cos, sin = rope_tables(torch.arange(total)[None], layers[0].q_norm.shape[0])
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    for layer, norm in zip(layers, norms[:-1], strict=True):
        a = rms_norm(x, norm)
        if layer.attention_conv is not None:
            mix = conv_weights(a, layer.attention_conv)
            a = mix_rows(a, mix[:, :, 0], layer.attention_conv.base[0])
        rows = a if context is None else torch.cat((context[None], a), 1)
        dim = layer.q_norm.shape[0]
        heads = layer.out.shape[1] // dim
        qkv = F.linear(rows, layer.qkv).view(1, total, -1, dim)
        kv_heads = (qkv.shape[2] - heads) // 2
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        q = rope(rms_norm(q, layer.q_norm), cos, sin)[:, before:]
        k = rope(rms_norm(k, layer.k_norm), cos, sin)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
        scores = torch.einsum("brhd,bshd->bhrs", q, k) / dim**0.5
        if context is None:
            future = torch.ones(total, total, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -float("inf"))
        out = torch.einsum("bhrs,bshd->brhd", scores.softmax(-1), v).flatten(2)
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


def naive_drafts(cycle: Cycle, context: Tensor, anchor: int) -> list[int]:
    """Drafts of one sequence from its features [S, M * E], by the definition."""
    drafter, target = cycle.drafter, cycle.target
    assert drafter is not None
    rows = rms_norm(F.linear(context, drafter.fc), drafter.hidden_norm)
    block = torch.cat((torch.tensor([anchor]), cycle.mask_row[0]))
    _, hidden = naive_forward(target.embed[block], drafter.layers, drafter.norms, rows)
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
    target = cycle.target
    outputs, _ = naive_forward(
        target.embed[torch.tensor(tokens)], target.layers, target.norms, None
    )
    return torch.cat([outputs[i] for i in cycle.setting.model.taps], -1)


def check(setting: Setting, kind: str) -> int:
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
            _, hidden = naive_forward(
                cycle.target.embed[torch.tensor(full)],
                cycle.target.layers,
                cycle.target.norms,
                None,
            )
            wanted = F.linear(hidden[-rows:], cycle.target.head).argmax(-1).tolist()
            assert chosen[b] == wanted, (number, b, chosen[b], wanted)
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
    args = parser.parse_args(argv)
    setting = Setting("tiny", 2, 32, 8, args.drafter, 3, args.mode)
    with torch.no_grad():
        compared = check(setting, args.attention)
    print(f"{args.drafter}, {args.attention}, {args.mode}: {compared} rows as in a plain forward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
