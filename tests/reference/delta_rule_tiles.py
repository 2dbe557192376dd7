"""Oracle of the op `delta_rule_tiles`: rows one after another over a state."""

import numpy as np

from tests.reference.gated_delta import delta_rule


def delta_rule_tiles(qkv, g, beta, num_rows, state, *, num_key_heads):
    """Sequence by sequence in f64: outputs [B, R, Hv, Dv] and the state after the last row.

    Arguments as those of the op. Rows that do not exist are not read; their outputs are zeros.
    """
    batch, rows, _ = qkv.shape
    _, heads, key_dim, value_dim = state.shape
    width = num_key_heads * key_dim
    out, after = np.zeros((batch, rows, heads, value_dim)), state.astype(np.float64)
    for b, count in enumerate(num_rows):
        mixed = qkv[b, :count].astype(np.float64)
        q, k, v = np.split(mixed, [width, 2 * width], axis=1)
        q, k = (x.reshape(-1, num_key_heads, key_dim) for x in (q, k))
        v = v.reshape(-1, heads, value_dim)
        gates = g[b, :count].astype(np.float64), beta[b, :count].astype(np.float64)
        if count:
            out[b, :count], states = delta_rule(q, k, v, *gates, after[b])
            after[b] = states[-1]
    return out, after
