"""`dflash check --sampling`: does a pair's sampled text follow its target's distribution?

The pair is cut down to a vocabulary of a few tokens that the target likes to say: rows of its
tables, nothing else. Then the joint distribution of the first three tokens has few enough outcomes
to know: the target alone says how likely each token is behind each prefix, one forced token at a
time. Drafted answers of many seeds are counted against that by chi-square.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import engine
from dflash_jax.drafters import no_drafter
from dflash_jax.params import DraftParams, MtpParams, Params, TargetParams
from dflash_jax.sampling import GREEDY_BELOW, SamplingOptions
from dflash_jax.words import counted

TOKENS = 3  # the first comes from the prefill, the others from cycles
TOP_P = 0.98
_FORCED = 2000.0  # added to a logit: then no other token is the best
_PROMPT = 16  # tokens of the answer that serve as a prompt
_LEAST_EXPECTED = 5  # of a bin, for chi-square to hold; smaller ones are joined
_ALARM = 1e-4  # a right decode gives less once in ten thousand checks
_LEAST_OUTCOMES = 8  # fewer tell nothing
_MOST_TOKENS = 32  # the law asks for each of their cubes: 33,824 prompts


@dataclass(frozen=True, slots=True)
class SamplingCheck:
    """Outcome of the comparison."""

    holds: bool
    p_value: float  # chance of a chi-square at least as large, if the answers follow the target
    chi_square: float
    degrees: int
    samples: int
    outcomes: int  # sequences of three tokens that the target can say
    vocabulary: tuple[int, ...]  # ids that are left
    temperature: float
    tau: float  # of cycles that commit two tokens at most

    def __str__(self) -> str:
        verdict = "follows the target" if self.holds else "DOES NOT FOLLOW THE TARGET"
        return (
            f"sampling: {verdict}: {counted(self.samples, 'answer')}, {self.outcomes} outcomes of "
            f"{TOKENS} tokens from {len(self.vocabulary)}, chi-square {self.chi_square:.1f} with "
            f"{counted(self.degrees, 'degree')} of freedom, p = {self.p_value:.3g}, "
            f"tau {self.tau:.2f}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A pair cut down, a text to go on from, and what its target says behind that."""

    params: Params
    prompt: list[int]
    vocabulary: tuple[int, ...]  # ids of the whole pair, in the order of the cut one's
    temperature: float
    law: dict[tuple[int, ...], float]  # probability of every three tokens that can come


def prepare(
    params: Params,
    prompt: Sequence[int],
    *,
    temperature: float = 3.0,
    vocabulary: int = 4,
    progress: Callable[[str], None] = lambda words: None,
    **sizes: Any,
) -> Trial:
    """Cut a pair down and ask its target for its law, without drafts.

    Args:
      prompt: token ids; the first tokens of the greedy answer to them are those that are left.
      sizes: of `generate`: batch, page_size, max_context, impl.

    Raises:
      ValueError: a request that cannot be met; nothing has been compiled.
    """
    most = min(_MOST_TOKENS, params.target.config.real_vocab)
    if not 2 <= vocabulary <= most or not temperature >= GREEDY_BELOW:
        raise ValueError(
            f"check: vocabulary is {vocabulary} and temperature {temperature}, wanted 2 to {most}, "
            f"and from {GREEDY_BELOW}"
        )
    SamplingOptions(temperature=temperature)  # what else it may not be, before anything compiles
    progress("looking for tokens that the target says")
    plain = Params(target=params.target, draft=no_drafter())
    how = {"max_new_tokens": 8 * vocabulary, "eos_ids": [], **sizes}
    (answer,) = engine.generate(plain, [prompt], **how)
    ids = tuple(sorted(list(dict.fromkeys([*answer.ids, *range(vocabulary)]))[:vocabulary]))
    cut = cut_vocabulary(params, ids)
    text = [ids.index(token) for token in answer.ids if token in ids][:_PROMPT]
    progress("asking the target for its distribution")
    law = _law(cut.target, text, vocabulary, temperature, sizes)
    return Trial(cut, text, ids, temperature, law)


def judge(
    trial: Trial, *, samples: int = 400, seed: int = 0, draft_sampling: bool | None = None, **sizes
) -> SamplingCheck:
    """Decode `samples` answers of three tokens and compare them with the law.

    Args:
      seed: of the first answer; the others follow it.
      draft_sampling, sizes: as for `generate`; the sizes may name `num_drafts` too.

    Raises:
      ValueError: too few answers, or too few different ones to expect.
    """
    law = trial.law
    if sum(samples * p >= _LEAST_EXPECTED for p in law.values()) < _LEAST_OUTCOMES:
        raise ValueError(
            f"check: at temperature {trial.temperature} the target says too few sequences of "
            f"{TOKENS} tokens to tell anything by {counted(samples, 'sample')}; wanted a higher "
            "temperature, more samples or another prompt"
        )
    request = SamplingOptions(temperature=trial.temperature, top_p=TOP_P)
    answers = engine.generate(
        trial.params,
        [trial.prompt] * samples,
        sampling=[replace(request, seed=seed + n) for n in range(samples)],
        draft_sampling=draft_sampling,
        max_new_tokens=TOKENS,
        eos_ids=[],
        **sizes,
    )
    statistic, degrees, p_value = chi_square(Counter(one.ids for one in answers), law)
    return SamplingCheck(
        holds=p_value > _ALARM,
        p_value=p_value,
        chi_square=statistic,
        degrees=degrees,
        samples=samples,
        outcomes=len(law),
        vocabulary=trial.vocabulary,
        temperature=trial.temperature,
        tau=engine.summary(answers).tau,
    )


def cut_vocabulary(params: Params, ids: Sequence[int]) -> Params:
    """The pair with a vocabulary of `ids`, numbered from 0; the mask token follows, never said.

    A head that knows a part of the vocabulary keeps the columns of those `ids` that it knows, with
    a map to their new numbers: what it cannot draft, it still cannot.

    Raises:
      ValueError: it knows none of them.
    """
    draft = params.draft
    masks = [draft.config.mask_id] if isinstance(draft, DraftParams) else []
    rows = np.array([*ids, *masks], np.int32)
    target = params.target
    target = target.replace(
        embed=target.embed[rows],
        head=None if target.head is None else target.head[rows],
        config=replace(target.config, vocab=len(rows), real_vocab=len(ids)),
    )
    if isinstance(draft, MtpParams):  # its tables are the target's
        layer = replace(draft.config.layer, vocab=len(rows), real_vocab=len(rows))
        draft = draft.replace(config=replace(draft.config, layer=layer))
    if not isinstance(draft, DraftParams):
        return Params(target=target, draft=draft)
    known = _known_ids(draft, ids)
    columns, count = (rows, len(ids)) if known is None else (known.columns, len(known.columns))
    config = replace(
        draft.config,
        vocab=len(rows),
        mask_id=len(ids),
        draft_vocab=None if known is None else count,
        selector_top_k=min(draft.config.selector_top_k, count),
    )

    def cut(owner: Any, kept: np.ndarray, *names: str) -> Any:
        given = {} if owner is None else {name: getattr(owner, name) for name in names}
        return owner and owner.replace(
            **{name: None if x is None else x[kept] for name, x in given.items()}
        )

    draft = cut(cut(draft, rows, "embed"), columns, "head").replace(
        config=config,
        selector=cut(draft.selector, rows, "predecessor", "successor"),
        markov=cut(cut(draft.markov, rows, "embed"), columns, "out"),
        d2t=None if known is None else jnp.asarray(known.ids),
    )
    return Params(target=target, draft=draft)


class _Known(NamedTuple):
    """What is left of a head that knows a part of the vocabulary."""

    columns: np.ndarray  # i32[Vd] of the whole head
    ids: np.ndarray  # i32[Vd] their new ids


def _known_ids(draft: DraftParams, ids: Sequence[int]) -> _Known | None:
    """Columns of the head for `ids`; None of a head over the whole vocabulary, without a map."""
    if draft.d2t is not None:
        told = np.asarray(draft.d2t)
    elif draft.config.draft_vocab is not None:
        told = np.arange(draft.config.draft_vocab)
    else:
        return None
    numbers = {token: number for number, token in enumerate(ids)}
    kept = [(c, numbers[token]) for c, token in enumerate(told.tolist()) if token in numbers]
    if not kept:
        raise ValueError(
            f"check: the drafter's head knows {counted(len(told), 'id')}, and none of the tokens "
            f"{list(ids)} that the target says; wanted a larger vocabulary or another prompt"
        )
    return _Known(*np.array(kept, np.int32).T)


def _law(
    target: TargetParams,
    prompt: list[int],
    vocabulary: int,
    temperature: float,
    sizes: dict[str, Any],
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of three tokens that the target can say."""
    ids = range(vocabulary)
    prefixes = [prefix for size in range(TOKENS) for prefix in itertools.product(ids, repeat=size)]
    asked = [(prefix, token) for prefix in prefixes for token in ids]
    answers = engine.generate(
        Params(target=target, draft=no_drafter()),
        [prompt + list(prefix) for prefix, _ in asked],
        sampling=[
            SamplingOptions(temperature=0, logit_bias={token: _FORCED}, logprobs=True)
            for _, token in asked
        ],
        max_new_tokens=1,
        eos_ids=[],
        **sizes,
    )
    scores = {key: (one.logprobs or (0.0,))[0] for key, one in zip(asked, answers, strict=True)}
    law = {(): 1.0}
    for _ in range(TOKENS):
        law = {
            (*prefix, token): weight * chance
            for prefix, weight in law.items()
            for token, chance in zip(ids, _filtered(scores, prefix, ids, temperature), strict=True)
            if chance > 0
        }
    return law


def _filtered(
    scores: dict[Any, float], prefix: tuple[int, ...], ids: Sequence[int], temperature: float
) -> np.ndarray:
    """Probabilities of `ids` behind a prefix after temperature and top-p, in f64."""
    x = np.array([scores[prefix, token] for token in ids]) / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    p[order[np.cumsum(p[order]) - p[order] >= TOP_P]] = 0
    return p / p.sum()


def chi_square(
    counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]
) -> tuple[float, int, float]:
    """Pearson's statistic of counts against a law, its degrees of freedom, and its p-value.

    An outcome that the law does not have makes the p-value 0.
    """
    total = sum(counts.values())
    expected = np.array([total * p for p in law.values()])
    found = np.array([counts[tokens] for tokens in law], float)
    if found.sum() < total:
        return float("inf"), len(law) - 1, 0.0
    small = expected < _LEAST_EXPECTED
    if small.any():
        expected = np.append(expected[~small], expected[small].sum())
        found = np.append(found[~small], found[small].sum())
    statistic = float(np.sum((found - expected) ** 2 / expected))
    degrees = max(len(expected) - 1, 1)
    p_value = jax.scipy.special.gammaincc(np.float32(degrees / 2), np.float32(statistic / 2))
    return statistic, degrees, float(p_value)
