"""Oracles of the ops in pallas_kernels, written as loops from spec/drafters.md and engine.md.

Letters as in the other files. Results are f64 unless a docstring says otherwise; inputs may be of
any float dtype and are widened first, so an oracle's own error is far below a tolerance.
"""

import numpy as np

MASKED = -0.7 * float(np.finfo(np.float32).max)  # what a masked score reads as
CANDIDATES = 16


def paged_attention(q, k_pool, v_pool, block_table, args, *, is_causal, window=None, scale=None):
    """Attend row by row and head by head: [B, R, H, D].

    q[B, R, H, D], pools[pages, K, page_size, D], block_table[B, P] with -1 for no page,
    args[B, 3] = (kv_len, q_offset, q_rope_pos). A key is read only if some row may see it, so
    whatever lies in unused slots does not matter.
    """
    batch, rows, heads, dim = q.shape
    _, kv_heads, page_size, _ = k_pool.shape
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((batch, rows, heads, dim))
    for b in range(batch):
        kv_len, q_offset = int(args[b, 0]), int(args[b, 1])
        exists = [
            key
            for key in range(min(kv_len, block_table.shape[1] * page_size))
            if block_table[b, key // page_size] >= 0
        ]
        for r in range(rows):
            keys = [key for key in exists if _sees(q_offset + r, key, is_causal, window)]
            if not keys:
                continue
            page = block_table[b, np.array(keys) // page_size]
            offset = np.array(keys) % page_size
            for h in range(heads):
                kv_head = h * kv_heads // heads
                k = k_pool[page, kv_head, offset].astype(np.float64)  # [keys, D]
                v = v_pool[page, kv_head, offset].astype(np.float64)
                scores = k @ q[b, r, h].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[b, r, h] = weights @ v / weights.sum()
    return out


def _sees(row, key, is_causal, window):
    """Whether the row at position `row` may attend to position `key`."""
    if is_causal and key > row:
        return False
    return window is None or abs(row - key) < window


def reshape_and_cache(k, v, k_pool, v_pool, slots):
    """Write k, v [N, K, D] at slot = page * page_size + offset and return new pools, as dtyped."""
    k_pool, v_pool = k_pool.copy(), v_pool.copy()
    page_size = k_pool.shape[2]
    for n, slot in enumerate(slots):
        if slot < 0:
            continue
        k_pool[slot // page_size, :, slot % page_size] = k[n].astype(k_pool.dtype)
        v_pool[slot // page_size, :, slot % page_size] = v[n].astype(v_pool.dtype)
    return k_pool, v_pool


def dynamic_conv(x, dyn, base):
    """y[b,i,c] = sum_t (base[t,c] + dyn[b,i,t,c//g]) * x[b,i-t,c]; zero before row 0 of a block."""
    x, dyn, base = (a.astype(np.float64) for a in (x, dyn, base))
    batch, rows, width = x.shape
    taps, groups = dyn.shape[2:]
    y = np.zeros_like(x)
    for b in range(batch):
        for i in range(rows):
            for t in range(min(taps, i + 1)):
                for c in range(width):
                    coefficient = base[t, c] + dyn[b, i, t, c // (width // groups)]
                    y[b, i, c] += coefficient * x[b, i - t, c]
    return y


def top16(logits, *, k=CANDIDATES, vocab=None):
    """The k best of each row by (value descending, id ascending): f32[N, 16], i32[N, 16].

    NaN and minus infinity rank below every number and read as MASKED; entries from k on are
    (MASKED, 0).
    """
    logits = np.asarray(logits, np.float32)[:, :vocab]
    vals = np.full((len(logits), CANDIDATES), MASKED, np.float32)
    ids = np.zeros((len(logits), CANDIDATES), np.int32)
    for n, row in enumerate(logits):
        row = np.where(np.isnan(row), -np.inf, row)
        best = np.argsort(-row, kind="stable")[:k]  # stable: equal values stay in order of id
        ids[n, :k] = best
        vals[n, :k] = np.where(row[best] == -np.inf, MASKED, row[best])
    return vals, ids


def argmax_rows(logits, *, vocab=None):
    """The best id of each row by the same order: i32[N]."""
    return top16(logits, k=1, vocab=vocab)[1][:, 0]


def selector_walk(anchor, vals, ids, hproj, predecessor, successor, *, k=CANDIDATES):
    """Walk row by row: path i32[B, J] and the scores f64[B, J, 16] it saw, MASKED from k on.

    Row j scores candidate c as
    vals[j, c] + <predecessor[previous] * hproj[j], successor[ids[j, c]]>;
    the highest score wins, equal ones by lowest token id.
    """
    batch, rows, _ = vals.shape
    hproj, predecessor, successor = (a.astype(np.float64) for a in (hproj, predecessor, successor))
    path = np.zeros((batch, rows), np.int32)
    scores = np.full(vals.shape, MASKED)
    for b in range(batch):
        previous = anchor[b]
        for j in range(rows):
            left = predecessor[previous] * hproj[b, j]
            for c in range(k):
                scores[b, j, c] = vals[b, j, c] + left @ successor[ids[b, j, c]]
            top = scores[b, j, :k].max()
            previous = min(ids[b, j, c] for c in range(k) if scores[b, j, c] == top)
            path[b, j] = previous
    return path, scores


def skinny_matmul(x, w, *, residual=None, out_dtype=None):
    """x @ w.T rounded to `out_dtype` (x's by default); a residual is added after the rounding."""
    product = (x.astype(np.float64) @ w.astype(np.float64).T).astype(out_dtype or x.dtype)
    return product if residual is None else product + residual


def skinny_matmul_swiglu(x, w_gate_up):
    """silu(gate) * up, where gate, up, silu and the product are each rounded to x's dtype."""
    gate, up = np.split(skinny_matmul(x, w_gate_up), 2, axis=1)
    wide = gate.astype(np.float64)
    return (wide / (1 + np.exp(-wide))).astype(x.dtype) * up
