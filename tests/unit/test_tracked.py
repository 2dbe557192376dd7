"""Known fault B24: a stop string, wherever in blocks and chunks its tokens come in. Host side."""

import numpy as np
import pytest

from dflash_jax.sampling import SamplingOptions
from dflash_jax.state import Status
from dflash_jax.tokenizer import StreamDecoder, Tokenizer
from dflash_jax.tracked import Tracked
from scripts.make_tiny import write_tiny_pair

BLOCK = 15
TEXT = "ab cd ef gh ij kl mn op qr st uv wx yz 01 23 45 67 89"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write_tiny_pair(tmp_path_factory.mktemp("tiny")).target)


def run(tokenizer, ids, stops, sizes, *, end=Status.LENGTH):
    """Feed ids in cycles of `sizes`, the first token by itself; the answer and its pieces."""
    one = Tracked(
        0,
        np.zeros(1, np.int32),
        len(ids),
        StreamDecoder(tokenizer),
        SamplingOptions(temperature=0, stop=stops),
    )
    pieces, at = [], 0
    for number, size in enumerate([1, *sizes]):
        if one.status not in (Status.EMPTY, Status.ACTIVE):
            break
        part = ids[at : at + size]
        at += len(part)
        one.ids.extend(part)
        one.hashes.extend(part)
        if number:
            counts = {"committed": len(part), "accepted": len(part) - 1, "proposed": BLOCK}
            one.cycles.append({n: np.array([x], np.int32) for n, x in counts.items()})
        one.status = end if at == len(ids) else Status.ACTIVE
        one.read()
        pieces.append(one.take_text())
    return one, pieces


def cycles_of(count, size):
    return [size] * (-(-count // size))


@pytest.mark.parametrize("size", [1, 4, BLOCK, 60])
@pytest.mark.parametrize("stop", ["b", " cd", "gh ij", "89", "q", "23 45 67 8"])
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(tokenizer, stop, size):
    ids = tokenizer.encode(TEXT)
    one, pieces = run(tokenizer, ids, [stop], cycles_of(len(ids), size))
    assert one.text == "".join(pieces) == TEXT[: TEXT.index(stop)]
    assert one.status == Status.STOP and one.stop_string == stop
    assert one.ids == ids[: len(one.ids)] and one.hashes == one.ids
    assert stop in tokenizer.decode(one.ids) and stop not in tokenizer.decode(one.ids[:-1])
    committed = sum(int(chunk["committed"].sum()) for chunk in one.cycles)
    assert committed + 1 == len(one.ids)
    assert all((chunk["accepted"] <= chunk["committed"]).all() for chunk in one.cycles)


def test_a_stop_string_is_found_at_the_first_the_middle_and_the_last_token_of_a_block(tokenizer):
    ids = tokenizer.encode(TEXT)
    for offset in range(BLOCK + 1):  # from the last token of the block before to the last of this
        end = 1 + BLOCK + offset  # tokens of the answer
        whole, before = tokenizer.decode(ids[:end]), tokenizer.decode(ids[: end - 2])
        stop = whole[len(before) :]  # two tokens, that straddle the blocks' edge at first
        first = TEXT.index(stop)
        one, _ = run(tokenizer, ids, [stop], cycles_of(len(ids), BLOCK))
        assert one.text == TEXT[:first]
        if first == len(before):
            assert len(one.ids) == end


def test_text_that_a_stop_string_may_claim_is_held_back_and_comes_if_it_does_not(tokenizer):
    ids = tokenizer.encode("one two three")
    one, pieces = run(tokenizer, ids, ["two threw", "eeee"], [1] * len(ids))
    assert one.text == "".join(pieces) == "one two three" and one.stop_string is None
    at = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]
    text = [len(tokenizer.decode(ids[: n + 1])) for n in range(len(pieces))]
    held = [whole - out for whole, out in zip(text, at, strict=True)]
    assert max(held) >= len("two thre")


def test_the_earliest_of_several_stop_strings_counts_and_of_these_the_longest(tokenizer):
    ids = tokenizer.encode(TEXT)
    one, _ = run(tokenizer, ids, ["ij", "gh", "gh i"], [60])
    assert one.text == "ab cd ef " and one.stop_string == "gh"
    whole, _ = run(tokenizer, ids, ["zz"], [60])
    assert whole.text == TEXT and whole.status == Status.LENGTH


def test_a_stop_token_ends_the_text_before_a_stop_string_is_looked_for_in_it(tokenizer):
    ids = tokenizer.encode("ab cd")
    one, _ = run(tokenizer, ids, [tokenizer.decode(ids[-1:])], [60], end=Status.STOP)
    assert one.stop_string is None and one.ids == ids
    assert one.text == tokenizer.decode(ids[:-1])
