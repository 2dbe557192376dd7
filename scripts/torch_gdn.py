"""A Gated-DeltaNet layer over a step's rows in PyTorch, with a state kept for every row.

A hybrid's rejected rows must leave its state. Serving engines keep the state behind each row of a
step, and the next step goes on from the one behind the last accepted row: nothing is run again,
for R states written where one is read. That is what is timed here. Ours instead keeps the rows and
folds the accepted ones in when the next step reads the state.
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_shapes import Recurrent

_EPS = 1e-6


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Recurrent], Tensor]


class GdnLayer(NamedTuple):
    in_proj: Tensor  # [C + Hv * Dv + 2 * Hv, E]: channels q, k, v; z; beta; decay
    conv: Tensor  # [taps, C]
    a_log: Tensor  # f32[Hv]
    dt_bias: Tensor  # f32[Hv]
    norm: Tensor  # [Dv]
    out: Tensor  # [E, Hv * Dv]
    post_norm: Tensor
    gate_up: Tensor  # [2F, E]
    down: Tensor


class GdnState(NamedTuple):
    """One layer's, of which a step reads what the last accepted row left."""

    states: Tensor  # f32[B, R, Hv, Dk, Dv] behind each row of the last step
    window: Tensor  # [B, taps - 1 + R, C] rows into the convolution: those in front, the step's


def mix_recurrent(
    normed: Tensor, layer: GdnLayer, carried: GdnState, kept: Tensor, c: Recurrent, rule: Rule
) -> Tensor:
    """What the layer adds to normed rows [B, R, E]; `kept` i64[B] rows of the last step, >= 1."""
    batch, rows, _ = normed.shape
    sizes = (c.conv_width, c.value_width, c.value_heads, c.value_heads)
    channels, z, b, a = F.linear(normed, layer.in_proj).split(sizes, -1)
    g = -layer.a_log.exp() * F.softplus(a.float() + layer.dt_bias)
    beta = b.float().sigmoid()
    index = kept[:, None] + torch.arange(c.taps - 1, device=kept.device)
    before = carried.window.gather(1, index[..., None].expand(-1, -1, c.conv_width))
    window = torch.cat((before, channels), 1)
    carried.window.copy_(window)
    mixed = window[:, :rows].float() * layer.conv[0].float()
    for j in range(1, c.taps):
        mixed = mixed + window[:, j : j + rows].float() * layer.conv[j].float()
    mixed = F.silu(mixed).to(normed.dtype)
    out = rule(mixed.contiguous(), g.contiguous(), beta.contiguous(), carried.states, kept, c)
    out = (out * torch.rsqrt(out.square().mean(-1, keepdim=True) + _EPS)).to(normed.dtype)
    gated = (out * layer.norm).float() * F.silu(z.view(out.shape).float())
    return F.linear(gated.to(normed.dtype).flatten(2), layer.out)


def rule_named(name: str) -> Rule:
    """`delta_rows` as a Triton kernel ("triton"), otherwise by plain operations."""
    if name == "triton":
        from torch_delta_rule import delta_rows as fused  # a CPU's torch may come without triton

        return fused
    return delta_rows


def delta_rows(
    mixed: Tensor, g: Tensor, beta: Tensor, states: Tensor, kept: Tensor, c: Recurrent
) -> Tensor:
    """The delta rule row by row in f32, by plain operations.

    Args:
      mixed: [B, R, C] out of the convolution.
      g, beta: f32[B, R, Hv].
      states: f32[B, R, Hv, Dk, Dv]; read at kept - 1, left as they are behind each row.
    Returns:
      f32[B, R, Hv, Dv].
    """
    batch, rows, _ = mixed.shape
    keys = c.key_heads * c.key_dim
    q, k, v = mixed.float().split((keys, keys, c.value_width), -1)

    def of_values(x: Tensor) -> Tensor:
        x = x.view(batch, rows, c.key_heads, c.key_dim)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
        return x.repeat_interleave(c.value_heads // c.key_heads, 2)

    q, k = of_values(q) * c.key_dim**-0.5, of_values(k)
    v = v.view(batch, rows, c.value_heads, c.value_dim)
    decay = g.exp()[..., None, None]
    state = states[torch.arange(batch, device=kept.device), kept - 1]
    outputs = []
    for row in range(rows):
        state = state * decay[:, row]
        error = (v[:, row] - (state * k[:, row, :, :, None]).sum(2)) * beta[:, row, :, None]
        state = state + k[:, row, :, :, None] * error[:, :, None]
        outputs.append((state * q[:, row, :, :, None]).sum(2))
        states[:, row] = state
    return torch.stack(outputs, 1)
