"""Oracle of the op `gated_delta_rows`: kept rows into the state, then new rows over it."""

import numpy as np

from tests.reference.gated_delta import delta_rule


def gated_delta_rows(
    qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept, *, num_key_heads
):
    """Sequence by sequence in f64: outputs [B, R, Hv, Dv] and the state with kept rows folded.

    Arguments as those of the op. Only rows that count are read, so the others may hold anything;
    their outputs are zeros. A slot outside of the state has no rows.
    """
    batch, rows, _ = qkv.shape
    num_slots, heads, key_dim, value_dim = state.shape
    key_width = num_key_heads * key_dim
    out, after = np.zeros((batch, rows, heads, value_dim)), state.astype(np.float64)

    def split(mixed):
        """k and v by head, of rows without queries."""
        k = mixed[:, :key_width].reshape(-1, num_key_heads, key_dim)
        return k, mixed[:, key_width:].reshape(-1, heads, value_dim)

    for b in range(batch):
        slot, kept, new = slots[b], num_kept[b], num_rows[b]
        if not 0 <= slot < num_slots:
            continue
        k, v = split(past_kv[slot, :kept].astype(np.float64))
        gates = past_g[slot, :kept].astype(np.float64), past_beta[slot, :kept].astype(np.float64)
        if kept:
            after[slot] = delta_rule(np.ones_like(k), k, v, *gates, after[slot])[1][-1]
        mixed = qkv[b, :new].astype(np.float64)
        q = mixed[:, :key_width].reshape(-1, num_key_heads, key_dim)
        k, v = split(mixed[:, key_width:])
        gates = g[b, :new].astype(np.float64), beta[b, :new].astype(np.float64)
        out[b, :new] = delta_rule(q, k, v, *gates, after[slot])[0]
    return out, after
