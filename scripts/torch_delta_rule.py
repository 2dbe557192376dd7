"""The delta rule of a step's rows as one Triton kernel, for the PyTorch side.

A program holds one tile of a head's state in registers over all rows. It reads the state that the
last accepted row left and writes the one behind every row, so that any of them can be gone on from.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# torch and its triton are no dependencies of the package.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_COLUMNS = 32  # of the state a program holds


@triton.jit
def _rows_kernel(
    mixed,
    g,
    beta,
    states,
    kept,
    out,
    channels,
    scale,
    rows: tl.constexpr,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    columns: tl.constexpr,
):
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    of_key = tl.arange(0, key_dim)
    of_value = tl.program_id(0) * columns + tl.arange(0, columns)
    size = key_dim * value_dim
    step = value_heads * size  # from one row's states to the next one's
    tile = (sequence * rows * value_heads + head) * size
    tile += of_key[:, None] * value_dim + of_value[None, :]
    state = tl.load(states + tile + (tl.load(kept + sequence) - 1) * step)
    key_head = head // (value_heads // key_heads)
    for row in range(rows):
        at = sequence * rows + row
        q_at = mixed + at * channels + key_head * key_dim
        q = tl.load(q_at + of_key).to(tl.float32)
        k = tl.load(q_at + key_heads * key_dim + of_key).to(tl.float32)
        v_at = mixed + at * channels + 2 * key_heads * key_dim + head * value_dim
        v = tl.load(v_at + of_value).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q) + 1e-6) * scale)
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        state = state * tl.exp(tl.load(g + at * value_heads + head))
        error = v - tl.sum(state * k[:, None], axis=0)
        error = error * tl.load(beta + at * value_heads + head)
        state = state + k[:, None] * error[None, :]
        tl.store(
            out + (at * value_heads + head) * value_dim + of_value,
            tl.sum(state * q[:, None], axis=0),
        )
        tl.store(states + tile + row * step, state)


def delta_rows(
    mixed: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    kept: torch.Tensor,
    c: Any,
) -> torch.Tensor:
    """As `torch_gdn.delta_rows`: out f32[B, R, Hv, Dv], and every row's state in `states`."""
    batch, rows, channels = mixed.shape
    out = torch.empty(
        (batch, rows, c.value_heads, c.value_dim), dtype=torch.float32, device=mixed.device
    )
    columns = min(_COLUMNS, c.value_dim)
    _rows_kernel[(c.value_dim // columns, c.value_heads, batch)](
        mixed,
        g,
        beta,
        states,
        kept,
        out,
        channels,
        c.key_dim**-0.5,
        rows=rows,
        key_heads=c.key_heads,
        value_heads=c.value_heads,
        key_dim=c.key_dim,
        value_dim=c.value_dim,
        columns=columns,
        num_warps=4,
    )
    return out
