"""Oracle of `markov_argmax`: NumPy in f64, from spec/drafters.md §5.1."""

import numpy as np

from tests.reference.ops import argmax_rows


def markov_argmax(base, code, out, row=0, *, vocab=None, with_bias=False):
    """Best ids i32[B] of base[:, row] plus the bias, ties to the lowest, and the bias if asked for.

    The bias of column v is the inner product of `code` with row v of `out`.
    """
    bias = np.asarray(code, np.float64) @ np.asarray(out, np.float64).T
    ids = argmax_rows(np.asarray(base, np.float64)[:, row] + bias, vocab=vocab)
    return ids, bias.astype(np.float32) if with_bias else None
