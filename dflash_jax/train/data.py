"""The training text: openings of a batch, what comes back, and what is kept of it.

Rows are told apart by style. The evaluation prompts ride along in the first batch, answered
greedily like at inference, so that acceptance on them is known before any engine runs; they are
never trained on, and a training row that shares 13 tokens in a row with one of them is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train.arrays import read_arrays, write_arrays
from dflash_jax.train.eval_sets import EVAL_SETS, eval_prompts
from dflash_jax.train.generate import ANSWER, ChatRules, Openings
from dflash_jax.train.seeds import MIX, STYLES, draw_seed

NGRAM = 13
_MARK = "PLACE-OF-THE-TEXT"


@dataclass(frozen=True)
class ChatFormat:
    """The chat template taken apart around the user's words."""

    head: str  # up to the first word of the user
    tail: str  # from the end of the user's turn to the first word of the answer
    between: str  # from after the end of an answer to the first word of the next user turn

    @staticmethod
    def of(tokenizer: Tokenizer) -> ChatFormat:
        """Read it off two rendered conversations, so that it is what inference sends.

        Raises:
          ValueError: no template, or one whose user turn does not end with a special token.
        """
        user = {"role": "user", "content": _MARK}
        head, tail = tokenizer.render_chat([user]).split(_MARK)
        answer = {"role": "assistant", "content": _MARK}
        parts = tokenizer.render_chat([user, answer, user]).split(_MARK)
        end = next(
            (text for text in control_tokens(tokenizer).values() if tail.startswith(text)), ""
        )
        if not end or not parts[2].startswith(end):
            raise ValueError(
                f"chat template: after a user's words comes {tail!r} and after an answer "
                f"{parts[2]!r}, wanted both to begin with the special token that ends a turn"
            )
        return ChatFormat(head, tail, parts[2].removeprefix(end))


def control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens by id: they steer and are no text."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return {index: token.content for index, token in sorted(added.items()) if token.special}


def chat_rules(tokenizer: Tokenizer, stops: Iterable[int]) -> ChatRules:
    """Rules of `generate` for this tokenizer."""
    form = ChatFormat.of(tokenizer)
    turn = tokenizer.encode(form.tail, add_special_tokens=False)
    return ChatRules(
        turn=tuple(turn),
        next_turn=tuple(tokenizer.encode(form.between, add_special_tokens=False)),
        stops=tuple(sorted(set(stops))),
        banned=tuple(index for index in control_tokens(tokenizer) if index != turn[0]),
    )


def quotes_in_vocab(tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """i32[V]: docstring quotes in each vocabulary entry."""
    texts = (tokenizer.backend.id_to_token(i) or "" for i in range(vocab))
    return np.asarray([t.count('"""') + t.count("'''") for t in texts], np.int32)


def random_openings(
    tokenizer: Tokenizer, rng: np.random.Generator, num_rows: int, length: int
) -> tuple[Openings, np.ndarray]:
    """Openings of `num_rows` conversations and each one's index in STYLES."""
    head = ChatFormat.of(tokenizer).head
    taken = _entry_points()
    styles = rng.choice(len(STYLES), num_rows, p=MIX)
    prompts = np.zeros((num_rows, length), np.int32)
    lengths, limits, quotes = (np.zeros(num_rows, np.int32) for _ in range(3))
    for i, style in enumerate(styles):
        seed = draw_seed(rng, STYLES[style])
        while any(f"def {name}(" in seed.text for name in taken):
            seed = draw_seed(rng, STYLES[style])
        ids = tokenizer.encode(head + seed.text, add_special_tokens=False)[:length]
        prompts[i, : len(ids)] = ids
        lengths[i], limits[i], quotes[i] = len(ids), seed.user_limit, seed.quote_limit
    none = np.zeros(num_rows, bool)
    return Openings(prompts, lengths, none, limits, quotes), styles.astype(np.int8)


def _entry_points() -> set[str]:
    """Names of the functions that HumanEval's prompts end with."""
    found = set()
    for row in eval_prompts("humaneval"):
        heads = [line for line in row["prompt"].splitlines() if line.startswith("def ")]
        found.add(heads[-1].removeprefix("def ").split("(")[0])
    return found


def chat_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A single user turn as inference encodes it."""
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def put_eval_rows(
    openings: Openings, tokenizer: Tokenizer, sets: Sequence[str], room: int
) -> list[str]:
    """Replace the first rows of `openings` by evaluation prompts; returns each row's set.

    Prompts that leave less than `room` tokens for the answer are left out.
    """
    length = openings.prompts.shape[1]
    names = []
    for name in sets:
        for row in eval_prompts(name):
            ids = chat_ids(tokenizer, row["prompt"])
            if len(ids) + room > length or len(names) >= len(openings.lengths):
                continue
            at = len(names)
            openings.prompts[at] = 0
            openings.prompts[at, : len(ids)] = ids
            openings.lengths[at] = len(ids)
            openings.answers_next[at] = True
            names.append(name)
    return names


def _ngram_hashes(tokens: np.ndarray) -> np.ndarray:
    """u64[..., T-12] hashes of every 13 tokens in a row of [..., T]."""
    wide = tokens.astype(np.uint64) + np.uint64(1)
    count = tokens.shape[-1] - NGRAM + 1
    hashes = np.zeros((*tokens.shape[:-1], max(count, 0)), np.uint64)
    for i in range(NGRAM if count > 0 else 0):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + wide[..., i : i + count]
        hashes ^= hashes >> np.uint64(29)
    return hashes


def eval_hashes(tokenizer: Tokenizer, sets: Sequence[str] = EVAL_SETS) -> np.ndarray:
    """Sorted hashes of the 13-grams of the evaluation prompts, both turns of MT-bench's."""
    found = []
    for name in sets:
        for row in eval_prompts(name):
            for text in (row["prompt"], row.get("second_turn", "")):
                ids = tokenizer.encode(text, add_special_tokens=False)
                found.append(_ngram_hashes(np.asarray(ids)))
    return np.unique(np.concatenate(found))


def shares_ngram(tokens: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """bool[B]: rows of i32[B, T] that hold a 13-gram of `hashes`."""
    return np.isin(_ngram_hashes(tokens), hashes).any(axis=1)


@dataclass(frozen=True)
class Corpus:
    """Rows of text on the host."""

    tokens: np.ndarray  # i32[N, T]
    is_answer: np.ndarray  # bool[N, T] tokens that the target wrote greedily
    styles: np.ndarray  # i8[N] index in STYLES

    @staticmethod
    def empty(length: int) -> Corpus:
        """No rows."""
        tokens = np.zeros((0, length), np.int32)
        return Corpus(tokens, tokens > 0, np.zeros(0, np.int8))

    @staticmethod
    def join(parts: Sequence[Corpus]) -> Corpus:
        columns = zip(*((p.tokens, p.is_answer, p.styles) for p in parts), strict=True)
        return Corpus(*(np.concatenate(column) for column in columns))

    def rows(self, index: np.ndarray | slice) -> Corpus:
        return Corpus(self.tokens[index], self.is_answer[index], self.styles[index])

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        columns = {"tokens": self.tokens, "is_answer": self.is_answer, "styles": self.styles}
        write_arrays(path, columns)

    @staticmethod
    def load(path: Path) -> Corpus:
        data = read_arrays(path, ("tokens", "is_answer", "styles"))
        return Corpus(data["tokens"].astype(np.int32), data["is_answer"], data["styles"])


def keep_rows(
    tokens: np.ndarray, roles: np.ndarray, styles: np.ndarray, hashes: np.ndarray
) -> tuple[Corpus, int]:
    """Rows with at least 8 answer tokens and no 13-gram of the evaluation; and how many had one."""
    is_answer = roles == ANSWER
    shared = shares_ngram(tokens, hashes)
    kept = ~shared & (is_answer.sum(1) >= 8)
    return Corpus(tokens[kept], is_answer[kept], styles[kept]), int(shared.sum())


def batch_rows(num_rows: int, batch: int, step: int, seed: int) -> np.ndarray:
    """Row indices of one training step: a new permutation every epoch, a function of its inputs."""
    per_epoch = num_rows // batch
    if not per_epoch:
        raise ValueError(f"training corpus has {num_rows} rows, wanted at least a batch of {batch}")
    epoch, at = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(num_rows)
    return order[at * batch : (at + 1) * batch]
