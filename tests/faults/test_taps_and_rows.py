"""Known faults A05 and A20: which rows the drafter sees, of the target and of its own block.

About 30 CPU seconds.
"""

import numpy as np
import pytest

from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")

ROWS = 8


@pytest.mark.parametrize("taps", [(0, 1), (1,), (-1, 0)], ids=str)
def test_a_tap_is_the_residual_stream_behind_its_layer_the_last_one_too(taps):
    """A05: before the final norm, and without a plane too many or too few."""
    pair = kit.pair(kind="dflash", layers="one", taps=taps)
    fixed = kit.sizes(pair.params, 1, max_context=64)
    prompt = kit.prompt(13)
    _, at = kit.start(pair.params, fixed, [kit.Request(prompt, 20)])
    hidden = pair.target.forward(list(prompt)).hidden
    want = np.concatenate([hidden[tap + 1] for tap in taps], axis=1)
    kit.assert_close(at[2].precompute_in[:13], want, "features")
    if taps[-1] == 1:
        residual = np.asarray(at[1].residual)[:13]
        np.testing.assert_array_equal(np.asarray(at[2].precompute_in)[:13, -64:], residual)


def test_a_drafter_that_taps_the_last_layer_decodes():
    """A05, end to end."""
    pair = kit.pair(kind="dflash", layers="one", taps=(0, 1))
    fixed = kit.sizes(pair.params, 1, max_context=64)
    request = kit.Request(kit.prompt(13), 20)
    want = kit.plain(pair.params, fixed, [request])
    got = kit.run(pair.params, fixed, [request])
    assert got.tokens == want.tokens and got.hashes == want.hashes


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_a_shortened_block_is_the_shorter_block_and_reads_no_row_behind_it(kind, rows):
    """A20: rows see each other in both directions, and a row that does not exist is no key."""
    pair = kit.pair(kind=kind)
    fixed = kit.standard(pair.params)
    requests = [kit.Request(kit.prompt(n), 30) for n in (3, 14, 40)]
    firsts, at = kit.start(pair.params, fixed, requests, keep=rows - 1)
    cycle = next(kit.cycles(pair.params, fixed, at))
    logits = np.asarray(cycle.after[2].logits).reshape(3, ROWS - 1, -1)
    for row, (one, first) in enumerate(zip(requests, firsts, strict=True)):
        text = [*one.prompt, int(first.token)]
        short = kit.reference_block(pair, text, rows)
        kit.assert_close(logits[row, : rows - 1], short.logits, f"block of {rows}")
        assert cycle.out.proposal.tokens[row, : rows - 1].tolist() == short.drafts
        whole = kit.reference_block(pair, text, ROWS)
        error = np.abs(whole.logits[: rows - 1] - short.logits).max()
        assert error > 0.1, "the rows behind make no difference: this pair shows nothing"
    assert cycle.out.verification.num_rows.tolist() == [rows] * 3
