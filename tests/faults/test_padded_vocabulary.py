"""Known fault B30: rows of the head that are padding are never emitted and never drafted.

About 20 CPU seconds.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")

REAL = 290


def with_padding(params, rows):
    """The pair with `rows` in the place of the head's last ones, which are no tokens."""
    target = params.target
    config = dataclasses.replace(target.config, real_vocab=REAL)
    head = target.head.at[REAL:].set(jnp.asarray(rows, target.head.dtype))
    return params.replace(target=target.replace(head=head, config=config))


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_padding_rows_with_huge_logits_are_neither_emitted_nor_drafted(kind):
    params = kit.pair(kind=kind, layers="one", alphabet=kit.ANY_ID).params
    huge = 100 * np.random.default_rng(0).standard_normal((307 - REAL, 64))
    requests = [kit.Request(kit.prompt(n), 24) for n in (5, 11)]
    outcomes = []
    for rows in (huge, np.zeros_like(huge)):
        padded = with_padding(params, rows)
        fixed = kit.sizes(padded, 2, max_context=64)
        firsts, at = kit.start(padded, fixed, requests)
        tokens, drafts = [[int(first.token)] for first in firsts], []
        for cycle in kit.cycles(padded, fixed, at):
            counts = cycle.out.verification.num_committed
            for row in range(2):
                tokens[row] += cycle.out.verification.committed[row, : counts[row]].tolist()
            drafts.append(cycle.out.proposal.tokens.tolist())
            logits = np.asarray(cycle.after[1].logits)
        outcomes.append((tokens, drafts))
    assert np.abs(logits[:, REAL:]).max() == 0
    assert outcomes[0] == outcomes[1]
    assert np.max(outcomes[0][0]) < REAL and np.max(outcomes[0][1]) < REAL
