"""What becomes training text: openings, evaluation prompts, the 13-gram filter, batches."""

import dataclasses
import re
from importlib import resources

import numpy as np
import pytest

from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train import data
from dflash_jax.train.eval_sets import EVAL_SETS, eval_prompts
from dflash_jax.train.generate import ANSWER, END, PROMPT, USER
from dflash_jax.train.seeds import MIX, STYLES, draw_seed
from scripts.make_tiny import write_tiny_pair


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write_tiny_pair(tmp_path_factory.mktemp("pair")).target)


# Evaluation prompts


@pytest.mark.parametrize(("name", "count"), [("gsm8k", 100), ("humaneval", 164), ("mt_bench", 80)])
def test_all_evaluation_prompts_are_there_once(name, count):
    rows = eval_prompts(name)
    assert len(rows) == len({row["id"] for row in rows}) == count
    assert len({row["prompt"] for row in rows}) == count
    assert all(row["prompt"].strip() for row in rows)


def test_evaluation_prompts_come_with_their_notices():
    folder = resources.files("dflash_jax") / "assets" / "eval_prompts"
    notice = (folder / "NOTICE.md").read_text(encoding="utf-8")
    assert {f"{name}.jsonl" for name in EVAL_SETS} == {
        x.name for x in folder.iterdir() if x.name.endswith(".jsonl")
    }
    for words in ("gsm8k.jsonl", "humaneval.jsonl", "mt_bench.jsonl", "MIT", "Apache License 2.0",
                  "OpenAI", "FastChat", "Permission is hereby granted"):  # fmt: skip
        assert words in notice, words


def test_an_unknown_set_is_refused():
    with pytest.raises(ValueError, match="'mbpp', wanted one of gsm8k, humaneval, mt_bench"):
        eval_prompts("mbpp")


def test_evaluation_prompts_that_fit_replace_the_first_rows(tokenizer):
    openings, _ = data.random_openings(tokenizer, np.random.default_rng(0), 160, 256)
    last = openings.prompts[159].copy()
    names = data.put_eval_rows(openings, tokenizer, ("mt_bench", "gsm8k"), room=64)
    assert names == sorted(names, reverse=True) and 10 < len(names) < 160  # long ones are left out
    for row, length in enumerate(openings.lengths[: len(names)]):
        text = tokenizer.decode(openings.prompts[row, :length], skip_special_tokens=False)
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and length + 64 <= 256
    assert openings.answers_next[: len(names)].all()
    assert not openings.answers_next[len(names) :].any()
    assert np.array_equal(openings.prompts[159], last)
    assert len(data.put_eval_rows(openings, tokenizer, EVAL_SETS, room=0)) == 160


# The filter


def test_a_row_that_shares_thirteen_tokens_with_an_evaluation_prompt_is_dropped(tokenizer):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (5, 128)).astype(np.int32)
    ids = tokenizer.encode(eval_prompts("gsm8k")[3]["prompt"], add_special_tokens=False)
    second = tokenizer.encode(eval_prompts("mt_bench")[7]["second_turn"], add_special_tokens=False)
    tokens[1, 50:63] = ids[4:17]
    tokens[2, 50:62] = ids[4:16]  # twelve in a row may be chance
    tokens[3, :13] = ids[4:17][::-1]
    tokens[4, -13:] = second[:13]
    roles = np.full(tokens.shape, ANSWER, np.int8)
    hashes = data.eval_hashes(tokenizer)
    kept, shared = data.keep_rows(tokens, roles, np.arange(5).astype(np.int8), hashes)
    assert kept.styles.tolist() == [0, 2, 3] and shared == 2
    assert not data.shares_ngram(tokens[:, :12], hashes).any()  # too short to share any


def test_rows_with_hardly_an_answer_are_dropped():
    tokens = np.zeros((2, 32), np.int32)
    roles = np.full((2, 32), END, np.int8)
    roles[:, :4], roles[:, 4:8] = PROMPT, USER
    roles[0, 8:15], roles[1, 8:16] = ANSWER, ANSWER
    kept, shared = data.keep_rows(tokens, roles, np.asarray([0, 1]), np.zeros(0, np.uint64))
    assert kept.styles.tolist() == [1] and shared == 0
    assert np.flatnonzero(kept.is_answer[0]).tolist() == list(range(8, 16))


def test_no_evaluation_prompt_would_pass_the_filter(tokenizer):
    hashes = data.eval_hashes(tokenizer)
    for name in EVAL_SETS:
        for row in eval_prompts(name)[::27]:
            ids = data.chat_ids(tokenizer, row["prompt"])
            assert data.shares_ngram(np.asarray(ids)[None], hashes).all(), row["id"]


# Openings


def test_openings_mix_the_styles_and_never_ask_for_a_function_of_humaneval(tokenizer):
    rows = 600
    openings, styles = data.random_openings(tokenizer, np.random.default_rng(1), rows, 128)
    shares = np.bincount(styles, minlength=3) / rows
    assert np.abs(shares - MIX).max() < 0.06  # three standard deviations
    head = tokenizer.encode(data.ChatFormat.of(tokenizer).head, add_special_tokens=False)
    assert (openings.prompts[:, : len(head)] == head).all()
    asked = {
        re.search(r"def (\w+)\([^)]*\).*:\s*$", row["prompt"].split('"""')[0].split("'''")[0])
        for row in eval_prompts("humaneval")
    }
    names = {match[1] for match in asked if match}
    assert len(names) > 100
    texts = [tokenizer.decode(row[:n]) for row, n in zip(*openings[:2], strict=True)]
    drafted = {name for text in texts for name in re.findall(r"def (\w+)\(", text)}
    assert len(drafted) > 50 and not drafted & names
    again, _ = data.random_openings(tokenizer, np.random.default_rng(1), rows, 128)
    assert np.array_equal(again.prompts, openings.prompts)


@pytest.mark.parametrize("style", STYLES)
def test_seeds_are_varied_and_have_limits(style):
    rng = np.random.default_rng(0)
    seeds = [draw_seed(rng, style) for _ in range(200)]
    assert {seed.style for seed in seeds} == {style}
    assert len({seed.text for seed in seeds}) > 40
    assert all(0 < seed.user_limit <= 200 for seed in seeds)
    assert all(seed.text == seed.text.rstrip(" ") for seed in seeds)
    open_quotes = [s for s in seeds if s.quote_limit]
    assert bool(open_quotes) == (style == "code")
    assert all(s.text.count('"""') + s.text.count("'''") == 1 for s in open_quotes)


# The template


def test_the_template_is_taken_apart_as_inference_renders_it(tokenizer):
    form = data.ChatFormat.of(tokenizer)
    user, answer = "What is two?", "It is 2."
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    again = [*turns, {"role": "user", "content": "And three?"}]
    want = tokenizer.render_chat(again)
    assert want == form.head + user + form.tail + answer + "<|im_end|>" + form.between + (
        "And three?" + form.tail
    )


def test_rules_ban_every_control_token_but_the_end_of_a_turn(tokenizer):
    rules = data.chat_rules(tokenizer, stops=(305, 303, 305))
    assert rules.end_of_turn == tokenizer.token_id("<|im_end|>") == 305
    assert rules.stops == (303, 305)
    assert set(rules.banned) == {tokenizer.token_id(x) for x in ("<|endoftext|>", "<|im_start|>")}
    assert tokenizer.decode(rules.next_turn, skip_special_tokens=False) == "\n<|im_start|>user\n"


def test_a_template_without_an_end_of_turn_is_refused(tokenizer):
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    other = dataclasses.replace(tokenizer, chat_template=plain)
    with pytest.raises(ValueError, match="wanted both to begin with the special token"):
        data.ChatFormat.of(other)


def test_quotes_are_counted_in_the_vocabulary(tmp_path):
    import tokenizers

    vocab = {'"""': 0, "a": 1, "'''": 2, '(""""""': 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    assert data.quotes_in_vocab(Tokenizer(backend), 6).tolist() == [1, 0, 1, 2, 0, 0]


# Rows and batches


def test_a_corpus_comes_back_and_is_cut_by_rows(tmp_path):
    rng = np.random.default_rng(0)
    parts = [
        data.Corpus(
            rng.integers(0, 49152, (n, 8)).astype(np.int32),
            rng.random((n, 8)) < 0.5,
            rng.integers(0, 3, n).astype(np.int8),
        )
        for n in (3, 1, 2)
    ]
    whole = data.Corpus.join(parts)
    whole.save(tmp_path / "corpus.npz")
    back = data.Corpus.load(tmp_path / "corpus.npz").rows(slice(2, None))
    assert np.array_equal(back.tokens, whole.tokens[2:]) and back.tokens.dtype == np.int32
    assert np.array_equal(back.is_answer, whole.is_answer[2:])
    assert np.array_equal(back.styles, whole.styles[2:])
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.npz"]
    assert len(data.Corpus.empty(8).tokens) == 0


def test_an_epoch_shows_every_row_once_in_an_order_of_its_own():
    epochs = [
        np.concatenate([data.batch_rows(13, 4, step, seed=1) for step in range(3 * e, 3 * e + 3)])
        for e in range(3)
    ]
    assert all(len(set(rows)) == 12 and max(rows) < 13 for rows in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(epochs[2][4:8], data.batch_rows(13, 4, 7, seed=1))
    assert not np.array_equal(epochs[0][:4], data.batch_rows(13, 4, 0, seed=2))
    with pytest.raises(ValueError, match="3 rows, wanted at least a batch of 4"):
        data.batch_rows(3, 4, 0, seed=1)
