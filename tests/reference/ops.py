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


def norm_rope_cache(
    rows, cos, sin, k_pools, v_pools, slots, q_norm, k_norms, *, num_heads, eps=1e-6
):
    """Norm and rotate heads, write keys and values: q f64[N, H, D] and new pools, as dtyped.

    rows[N, columns] hold H query heads, then for each layer K key heads and K value heads.
    """
    d, kv_heads = k_pools[0].shape[3], k_pools[0].shape[1]
    heads = rows.astype(np.float64)[:, : (num_heads + 2 * len(k_pools) * kv_heads) * d]
    heads = heads.reshape(len(rows), -1, d)

    def norm_and_rotate(x, weight):
        if weight is not None:
            scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
            x = x * scale * weight.astype(np.float64)
        return rotate_halves(x, cos[:, None].astype(np.float64), sin[:, None].astype(np.float64))

    q = norm_and_rotate(heads[:, :num_heads], q_norm)
    written = []
    for i, (k_pool, v_pool) in enumerate(zip(k_pools, v_pools, strict=True)):
        k, v = np.split(heads[:, num_heads + 2 * i * kv_heads :][:, : 2 * kv_heads], 2, axis=1)
        k = norm_and_rotate(k, None if k_norms is None else k_norms[i])
        k, v = np.where(np.isfinite(v), k, np.nan), np.where(np.isfinite(v), v, 0)
        written.append(reshape_and_cache(k, v, k_pool, v_pool, slots))
    k_pools, v_pools = zip(*written, strict=True)
    return q, k_pools, v_pools


def rotate_halves(x, cos, sin):
    """Turn pair (j, j + n) of the last axis by the angle whose cos and sin are [..., n]."""
    n = cos.shape[-1]
    out = x.copy()
    out[..., :n] = x[..., :n] * cos - x[..., n : 2 * n] * sin
    out[..., n : 2 * n] = x[..., n : 2 * n] * cos + x[..., :n] * sin
    return out


def dynamic_conv(x, dyn, base, norm=None, residual=None, *, side=None, eps=1e-6):
    """y[b,i,c] = sum_t (base[t,c] + dyn[b,i,t,c//g]) * x[b,i-t,c]; zero before row 0 of a block.

    With `side`, dyn[B, R, S, T, G] and base[S, T, E] hold several sides. A norm is an RMSNorm of
    the rows first, rounded to their dtype before its weight and after. With a residual: (y,
    residual + y).
    """
    if norm is not None:
        wide = x.astype(np.float64)
        scale = 1 / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps)
        x = (wide * scale).astype(x.dtype) * norm
    if side is not None:
        dyn, base = dyn[:, :, side], base[side]
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
    return y if residual is None else (y, residual + y)


def top16(logits, *, k=CANDIDATES, vocab=None, multiplier=1.0, soft_cap=None):
    """The k best of each row by (value descending, id ascending): f32[N, 16], i32[N, 16].

    Values are logits times the multiplier, then soft_cap * tanh(value / soft_cap). NaN and minus
    infinity rank below every number and read as MASKED; entries from k on are (MASKED, 0).
    """
    logits = np.asarray(logits, np.float32)[:, :vocab] * np.float32(multiplier)
    if soft_cap is not None:
        logits = np.float32(soft_cap) * np.tanh(logits / np.float32(soft_cap))
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


def greedy_rows(logits, *, vocab=None, with_hashes=False):
    """Best ids i32[N], whether all of a row's tokens are finite bool[N], and hashes u32[N] or None.

    A hash is the sum, modulo 2^32, of every column's f32 bit pattern times the odd number
    (2 * column + 1) * 2654435761; columns that are no tokens count.
    """
    is_finite = np.isfinite(np.asarray(logits, np.float32)[:, :vocab]).all(axis=1)
    hashes = None
    if with_hashes:
        # u64 wraps modulo 2^64, of which 2^32 is a divisor.
        odd = (2 * np.arange(logits.shape[1], dtype=np.uint64) + 1) * np.uint64(2654435761)
        sums = (logits.view(np.uint32).astype(np.uint64) * odd).sum(axis=1, dtype=np.uint64)
        hashes = (sums % np.uint64(2**32)).astype(np.uint32)
    return argmax_rows(logits, vocab=vocab), is_finite, hashes


def selector_walk(anchor, vals, ids, hproj, predecessor, successor, *, k=CANDIDATES):
    """Walk row by row: path i32[B, J] and the scores f64[B, J, 16] it saw, MASKED from k on.

    Row j scores candidate c as
    vals[j, c] + <predecessor[previous] * hproj[j], successor[ids[j, c]]>;
    the highest score wins, equal ones by lowest token id.
    """
    path, scores = np.zeros(vals.shape[:2], np.int32), np.full(vals.shape, MASKED)
    for b, row in enumerate(path):
        previous = anchor[b]
        for j in range(len(row)):
            lattice = vals[b, j], ids[b, j], hproj[b, j], predecessor, successor
            scores[b, j, :k] = _edge_scores(previous, *lattice)[:k]
            previous = row[j] = ids[b, j, _best(scores[b, j, :k], ids[b, j])]
    return path, scores


def selector_walk_sampled(
    anchor, vals, ids, hproj, predecessor, successor, temperature, uniforms, *, k=CANDIDATES
):
    """Walk by draws: path i32[B, J], scores f64[B, J, 16], and q f64[B, J, 16], 0 from k on.

    q is softmax(scores / temperature), or all on the greedy choice at temperature 0. The first
    candidate whose cumulative q exceeds the uniform number is drawn.
    """
    path, scores = np.zeros(vals.shape[:2], np.int32), np.full(vals.shape, MASKED)
    q = np.zeros(vals.shape)
    for b, row in enumerate(path):
        previous = anchor[b]
        for j in range(len(row)):
            lattice = vals[b, j], ids[b, j], hproj[b, j], predecessor, successor
            scores[b, j, :k] = _edge_scores(previous, *lattice)[:k]
            if temperature[b] > 0:
                shifted = scores[b, j, :k] - scores[b, j, :k].max()
                weights = np.exp(shifted / temperature[b])
                q[b, j, :k] = weights / weights.sum()
            else:
                q[b, j, _best(scores[b, j, :k], ids[b, j])] = 1
            drawn = int((np.cumsum(q[b, j]) <= uniforms[b, j]).sum())
            previous = row[j] = ids[b, j, drawn]
    return path, scores, q


def _edge_scores(previous, vals, ids, hproj, predecessor, successor):
    """f64[16]: unary scores and the edges from token `previous`."""
    left = predecessor[previous].astype(np.float64) * hproj.astype(np.float64)
    return vals + successor[ids].astype(np.float64) @ left


def _best(scores, ids):
    """Index of the highest score, equal ones by lowest id."""
    return min((c for c in range(len(scores)) if scores[c] == scores.max()), key=lambda c: ids[c])


def skinny_matmul(x, w, *, residual=None, out_dtype=None):
    """x @ w.T rounded to `out_dtype` (x's by default); a residual is added after the rounding."""
    product = (x.astype(np.float64) @ w.astype(np.float64).T).astype(out_dtype or x.dtype)
    return product if residual is None else product + residual


def skinny_matmul_swiglu(x, w_gate_up):
    """silu(gate) * up, where gate, up, silu and the product are each rounded to x's dtype."""
    gate, up = np.split(skinny_matmul(x, w_gate_up), 2, axis=1)
    wide = gate.astype(np.float64)
    return (wide / (1 + np.exp(-wide))).astype(x.dtype) * up
