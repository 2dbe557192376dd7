"""Where a verified block is cut: the first of a stop, the budget and a row that is not finite."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.state import MAX_STOP_IDS, DecodeState, Status
from dflash_jax.verify import _cut

ROWS = 5
STOP = 9


def cut(*, bad=None, stop=None, remaining=100, room=100, count=ROWS):
    """One sequence of 50 tokens whose target agrees to `count` tokens: (taken, status)."""
    committed = np.arange(ROWS, dtype=np.int32)[None]
    is_finite = np.ones((1, ROWS), bool)
    if bad is not None:
        is_finite[0, bad] = False
    if stop is not None:
        committed[0, stop] = STOP
    stop_ids = np.full((1, MAX_STOP_IDS), -1, np.int32)
    stop_ids[0, 0] = STOP

    def one(value):
        return jnp.full((1,), value, jnp.int32)

    state = DecodeState(
        tokens=jnp.zeros((1, 200), jnp.int32),
        seq_lens=one(50),
        anchor=one(1),
        remaining=one(remaining),
        max_lens=one(50 + room),
        keep=one(ROWS - 1),
        stop_ids=jnp.asarray(stop_ids),
        status=one(Status.ACTIVE),
        num_steps=jnp.int32(0),
    )
    taken, status = _cut(jnp.asarray(committed), jnp.asarray(is_finite), one(count), state)
    return int(taken[0]), Status(int(status[0]))


@pytest.mark.parametrize(
    "case, wanted",
    [
        ({}, (5, Status.ACTIVE)),
        ({"bad": 0}, (0, Status.NON_FINITE)),
        ({"bad": 3}, (3, Status.NON_FINITE)),
        ({"bad": 2, "stop": 3}, (2, Status.NON_FINITE)),
        ({"bad": 2, "remaining": 3}, (2, Status.NON_FINITE)),
        # Plain decoding ends before it would look at the row that is not finite.
        ({"bad": 3, "stop": 2}, (3, Status.STOP)),
        ({"bad": 4, "stop": 2}, (3, Status.STOP)),
        ({"bad": 3, "remaining": 3}, (3, Status.LENGTH)),
        ({"bad": 4, "remaining": 3}, (3, Status.LENGTH)),
        ({"bad": 3, "count": 3}, (3, Status.ACTIVE)),
        ({"bad": 3, "count": 3, "room": 3}, (3, Status.CONTEXT)),
    ],
    ids=str,
)
def test_a_row_that_is_not_finite_counts_only_where_plain_decoding_would_reach_it(case, wanted):
    assert cut(**case) == wanted
