"""The reference's loop with a made-up target whose next token is a rule, and any drafter."""

import numpy as np
import pytest

from tests.reference import loop, prompt_lookup
from tests.reference.dense_target import TargetOutput
from tests.reference.verify import accept_greedy, clip

VOCAB = 23
PROMPT = [3, 1, 4, 1, 5]


def target(ids):
    """The next token depends on the last three, so a wrong prefix shows."""
    logits = np.zeros((len(ids), VOCAB))
    for t in range(len(ids)):
        last = [0, 0, *ids[: t + 1]][-3:]
        logits[t, (7 * last[2] + 3 * last[1] + last[0] + 1) % VOCAB] = 1.0
    return TargetOutput(logits, [np.arange(len(ids), dtype=float)[:, None]] * 2, logits)


def plain(max_new_tokens, **options):
    return loop.generate(target, PROMPT, max_new_tokens, **options)


TEXT = plain(60).output_ids


def oracle(tokens, features, num_drafts):
    del features
    return TEXT[len(tokens) : len(tokens) + num_drafts]


def poison(k):
    def propose(tokens, features, num_drafts):
        drafts = oracle(tokens, features, num_drafts)
        if k < len(drafts):
            drafts[k] = (drafts[k] + 1) % VOCAB
        return drafts

    return propose


def lookup(tokens, features, num_drafts):
    del features
    return prompt_lookup.propose(tokens, num_drafts)


@pytest.mark.parametrize("k", range(8))
def test_poison_at_k_accepts_exactly_k_and_changes_no_token(k):
    got = loop.generate(target, PROMPT, 40, propose=poison(k), num_drafts=7)
    assert got.output_ids == plain(40).output_ids
    assert {step.num_accepted for step in got.steps[:-2]} == {k}
    starts = np.cumsum([len(PROMPT)] + [step.produced for step in got.steps])
    assert [step.start for step in got.steps] == starts[:-1].tolist()


def test_prompt_lookup_is_accepted_where_the_text_repeats():
    prompt = TEXT + PROMPT  # the rule reads three tokens, so the text goes on as it did before
    got = loop.generate(target, prompt, 40, propose=lookup, num_drafts=7)
    assert got.output_ids == loop.generate(target, prompt, 40).output_ids
    assert [step.num_accepted for step in got.steps[:4]] == [7, 7, 7, 7]


@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 7, 8, 9, 10])
def test_budget_is_met_exactly(max_new_tokens):
    got = loop.generate(target, PROMPT, max_new_tokens, propose=oracle, num_drafts=7)
    assert got.output_ids == TEXT[: len(PROMPT) + max_new_tokens]
    assert got.finish_reason == "length"


def test_last_blocks_shrink_to_the_budget_plus_one_row():
    got = loop.generate(target, PROMPT, 12, propose=poison(2), num_drafts=7)
    assert [len(step.verify_block_ids) for step in got.steps] == [8, 8, 6, 3]
    assert [step.produced for step in got.steps] == [3, 3, 3, 2]


@pytest.mark.parametrize("offset", range(1, 18))
def test_stop_token_ends_the_text_wherever_it_lands(offset):
    """Offsets inside the first block, on its bonus token, and in the next block."""
    stop = TEXT[len(PROMPT) + offset]
    first = TEXT.index(stop, len(PROMPT))
    got = loop.generate(target, PROMPT, 40, propose=oracle, num_drafts=7, stop_ids={stop})
    assert got.output_ids == TEXT[: first + 1] == plain(40, stop_ids={stop}).output_ids
    assert got.finish_reason == "stop"


def test_stop_token_sampled_by_the_prefill_runs_no_step():
    got = plain(40, stop_ids={TEXT[len(PROMPT)]})
    assert got.output_ids == TEXT[: len(PROMPT) + 1]
    assert got.steps == []


@pytest.mark.parametrize("max_len", [5, 6, 9, 12, 13, 14])
def test_context_limit_never_needs_a_position_beyond_it(max_len):
    got = loop.generate(target, PROMPT, 40, propose=oracle, num_drafts=7, max_len=max_len)
    assert got.output_ids == TEXT[: max_len + 1] == plain(40, max_len=max_len).output_ids
    assert got.finish_reason == "context"
    assert all(step.start + len(step.verify_block_ids) <= max_len for step in got.steps)


def test_drafter_sees_features_of_everything_but_the_anchor():
    seen = []

    def propose(tokens, features, num_drafts):
        seen.append((len(tokens), len(features), num_drafts))
        return poison(1)(tokens, features, num_drafts)

    loop.generate(target, PROMPT, 9, propose=propose, num_drafts=3, tap_ids=(0,))
    assert seen == [(6, 5, 3), (8, 7, 3), (10, 9, 3), (12, 11, 2)]


def test_acceptance_stops_at_the_first_difference():
    assert accept_greedy([4, 5, 6], [4, 9, 6, 7]) == (1, [4, 9])
    assert accept_greedy([4, 5, 6], [4, 5, 6, 7]) == (3, [4, 5, 6, 7])
    assert accept_greedy([4], [5, 6]) == (0, [5])
    assert accept_greedy([], [5]) == (0, [5])


def test_clip_cuts_at_the_budget_and_after_a_stop_token():
    assert clip([1, 2, 3], 2, ()) == [1, 2]
    assert clip([1, 2, 3], 9, {2}) == [1, 2]
    assert clip([1, 2, 3], 1, {2}) == [1]


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 8, 9, 1, 2, 3], [8, 9, 1]),
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),  # the most recent place
        ([1, 2, 3, 8, 7, 2, 3], []),  # two tokens match, three do not
        ([1, 2, 3, 8, 1, 2, 3], [8, 1, 2]),
        ([5, 5, 5, 5], [5]),  # the place may overlap the suffix; the text ends there
        ([1, 2, 3], []),
        ([1, 2], []),
    ],
)
def test_prompt_lookup_rule(tokens, wanted):
    assert prompt_lookup.propose(tokens, 3) == wanted
