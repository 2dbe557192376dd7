"""Prompt lookup against the reference, on random histories. About 5 CPU seconds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.drafters import prompt_lookup
from dflash_jax.params import Params
from dflash_jax.state import init_state
from tests import kit
from tests.reference.prompt_lookup import propose

pytestmark = pytest.mark.usefixtures("strict_dtypes")

DRAFTS = 7
BATCH = 16


def histories():
    """Texts of many lengths over few ids, among them periodic ones that overlap themselves."""
    rng = np.random.default_rng(0)
    for _ in range(10 * BATCH):
        length, ids = int(rng.integers(1, 60)), int(rng.integers(1, 5))
        yield rng.integers(0, ids, length).tolist()
    for period in range(1, 9):
        for length in (2, 3, 4, 5, 9, 23, 60):
            yield (list(range(period)) * 60)[:length]
    for cut in range(BATCH // 2):  # the only earlier place lies just before the suffix
        yield [9, 8, 7, *([5, 6] * cut)]


@pytest.mark.parametrize("ngram", [1, 2, 3, 5])
def test_proposals_equal_the_reference_on_any_history(ngram):
    target = kit.pair().params.target
    params = Params(target, dj.prompt_lookup_drafter(num_drafts=DRAFTS, ngram=ngram))
    fixed = kit.sizes(params, BATCH, max_context=80)

    @partial(jax.jit, static_argnames="fixed")
    def ours(tokens, lengths, num_rows, *, fixed):
        state = init_state(fixed)
        tokens = state.tokens.at[:, : tokens.shape[1]].set(tokens)
        state = state.replace(tokens=tokens, seq_lens=lengths - 1)
        return prompt_lookup.propose(params, state, num_rows, None, None, fixed=fixed)[0]

    texts = list(histories())
    assert len(texts) % BATCH == 0
    proposed = 0
    for at in range(0, len(texts), BATCH):
        batch = texts[at : at + BATCH]
        lengths = np.array([len(text) for text in batch], np.int32)
        # What stands behind the text is left over from an earlier call.
        tokens = np.tile(np.arange(5, dtype=np.int32), (BATCH, 16))
        for row, text in enumerate(batch):
            tokens[row, : len(text)] = text
        rows = np.arange(at, at + BATCH, dtype=np.int32) % (DRAFTS + 1) + 1
        got = ours(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(rows), fixed=fixed)
        for row, text in enumerate(batch):
            want = propose(text, DRAFTS, ngram)[: rows[row] - 1]
            count = int(got.num_proposed[row])
            assert count == len(want), text
            assert np.asarray(got.tokens)[row, :count].tolist() == want, text
            proposed += count
    assert proposed > 100


@pytest.mark.parametrize("wrong", [{"num_drafts": 0}, {"ngram": 0}], ids=str)
def test_a_lookup_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="prompt lookup: num_drafts is .* wanted both at least 1"):
        dj.prompt_lookup_drafter(**wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": np.zeros((2, 9))}, "tokens are float"),
        ({"tokens": np.zeros(9, np.int32)}, r"tokens are int32\[9\], wanted i32\[B, S\]"),
        ({"num_drafts": 0}, "num_drafts is 0, wanted at least 1"),
        ({"inner": "dflash", "num_drafts": 8}, "num_drafts is 8, wanted at least 1, at most 7"),
    ],
    ids=str,
)
def test_an_oracle_that_cannot_be_is_refused(arguments, message):
    good = {"tokens": np.zeros((2, 9), np.int32), "num_drafts": 7}
    if "inner" in arguments:
        arguments = {**arguments, "inner": kit.pair(kind="dflash").params.draft}
    with pytest.raises(ValueError, match=f"oracle: {message}"):
        dj.oracle_drafter(**{**good, **arguments})
