"""Drafters: `get(params.draft)` chooses a `Drafter` at trace time.

A drafter is two pure functions. `propose` guesses behind the anchor; `advance` takes the target
features of rows that were just committed, in prefill and after every verification.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from dflash_jax.config import RuleConfig
from dflash_jax.drafters import backbone, dflash, dflash2, dspark, mtp, oracle, prompt_lookup
from dflash_jax.drafters.oracle import oracle_drafter
from dflash_jax.drafters.prompt_lookup import prompt_lookup_drafter
from dflash_jax.drafters.proposal import CommittedRows, Proposal
from dflash_jax.mtp_config import DrafterConfig
from dflash_jax.options import DecodeOptions
from dflash_jax.params import DrafterParams, DraftParams, Params, RuleParams
from pallas_kernels import CANDIDATES

__all__ = [
    "CommittedRows",
    "Drafter",
    "Proposal",
    "get",
    "no_drafter",
    "oracle_drafter",
    "prompt_lookup_drafter",
]


class Drafter(NamedTuple):
    """propose(params, state, num_rows, buffers, scratch) -> Proposal, buffers, scratch;
    advance(params, rows: CommittedRows, buffers, scratch) -> buffers, scratch.

    Static keywords are `fixed` and `options` of propose, `fixed` and `impl` of advance.
    """

    propose: Callable
    advance: Callable


def no_drafter() -> RuleParams:
    """Plain decoding by a step of one row, the fastest there is (outside the bitwise law)."""
    return RuleParams(None, None, None, RuleConfig("none", 0))


def _keep_context(params, rows, buffers, scratch, *, fixed, impl="auto"):
    """A drafter without context of its own has nothing to advance."""
    return buffers, scratch


def propose_nothing(params, state, num_rows, buffers, scratch, *, fixed, options):
    """A step of one row: no drafter, or one that is asked for no draft."""
    tokens = jnp.zeros((fixed.batch, fixed.num_drafts), jnp.int32)
    return Proposal(tokens, jnp.zeros_like(num_rows)), buffers, scratch


_BY_KIND = {
    "none": Drafter(propose_nothing, _keep_context),
    "prompt_lookup": Drafter(prompt_lookup.propose, _keep_context),
    "oracle": Drafter(oracle.propose, _keep_context),
    "dflash": Drafter(dflash.propose, backbone.fuse_context),
    "dflash2": Drafter(dflash2.propose, backbone.fuse_context),
    "dspark": Drafter(dspark.propose, backbone.fuse_context),
    "mtp": Drafter(mtp.propose, mtp.advance),
}


# Whether drafts are drawn where the request is; otherwise each is its best token. Kinds that are
# not here follow a rule and have nothing to draw from.
_DRAWS_BY_DEFAULT = {"dflash": False, "dflash2": True, "dspark": True, "mtp": False}


def draws_drafts(config: DrafterConfig) -> bool | None:
    """Whether a drafter draws its drafts by default; None if it has no distribution."""
    return _DRAWS_BY_DEFAULT.get(config.kind)


def cuts_drafts(draft: DrafterParams) -> bool:
    """Whether a drafter proposes less than a full block of its own accord."""
    policy = draft.policy if isinstance(draft, DraftParams) else None
    if policy is None:
        return draft.config.kind == "prompt_lookup"
    return policy.steps_per_second is not None or float(policy.threshold) > 0


def check_options(config: DrafterConfig, options: DecodeOptions) -> None:
    """Raise ValueError for an option that a drafter cannot honour."""
    top_k = options.markov_top_k
    if not 0 <= top_k <= CANDIDATES:
        raise ValueError(f"markov_top_k is {top_k}, wanted 0 (all) to {CANDIDATES}")
    if top_k and not getattr(config, "markov_rank", 0):
        raise ValueError(
            f"markov_top_k is {top_k}, but the {config.kind} drafter has no Markov head to restrict"
        )


def get(draft: DrafterParams) -> Drafter:
    """The functions of a drafter; an oracle with an inner drafter runs that one first."""
    kind = draft.config.kind
    if kind not in _BY_KIND:
        raise NotImplementedError(
            f"drafter kind {kind!r} is not supported, wanted one of {', '.join(_BY_KIND)}"
        )
    if isinstance(draft, RuleParams) and draft.inner is not None:
        return _with_inner(_BY_KIND[kind], get(draft.inner))
    return _BY_KIND[kind]


def _with_inner(outer: Drafter, inner: Drafter) -> Drafter:
    """Run `inner` for its work and its scratch, then let `outer` choose the drafts."""

    def bare(params: Params) -> Params:
        return params.replace(draft=cast(RuleParams, params.draft).inner)

    def propose(params: Params, state, num_rows, buffers, scratch, *, fixed, options):
        static = {"fixed": fixed, "options": options}
        guess, buffers, scratch = inner.propose(
            bare(params), state, num_rows, buffers, scratch, **static
        )
        # The barrier keeps the inner drafts alive: a benchmark must pay for them.
        guess, num_rows = jax.lax.optimization_barrier((guess, num_rows))
        return outer.propose(params, state, num_rows, buffers, scratch, **static)

    def advance(params: Params, rows, buffers, scratch, *, fixed, impl="auto"):
        return inner.advance(bare(params), rows, buffers, scratch, fixed=fixed, impl=impl)

    return Drafter(propose, advance)
