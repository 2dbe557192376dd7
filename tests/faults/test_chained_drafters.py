"""Known faults A15, B12, B20 and B22: drafters whose drafts depend on the draft before.

About 40 CPU seconds.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import loop
from dflash_jax.draft_config import DraftConfig
from dflash_jax.drafters import dspark
from dflash_jax.drafters.choice import Draws
from dflash_jax.drafters.confidence import with_threshold
from dflash_jax.params import DraftParams, MarkovParams
from scripts.make_tiny import drafter_config, target_config, write_tiny_pair
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def permuting(permutation):
    """A drafter whose Markov head says nothing but what follows each token."""
    size = len(permutation)
    out = np.zeros((size, size), np.float32)
    out[permutation, np.arange(size)] = 1.0  # the successor's row reads its predecessor's latent
    markov = MarkovParams(jnp.eye(size, dtype=jnp.float32), jnp.asarray(out))
    config = SimpleNamespace(markov_kind="vanilla", markov_rank=size, vocab=size)
    nothing = (None,) * 4
    return DraftParams(*nothing, (), None, None, config, markov=markov)


@pytest.mark.parametrize(
    "top_k, impl",
    [(0, "auto"), (0, "interpret"), (16, "auto")],
    ids=["exact", "exact by the kernel", "candidates"],
)
def test_a_markov_table_that_permutes_walks_from_the_anchor(top_k, impl):
    """A15: row 0 follows the anchor, row 1 the draft of row 0, in every sequence."""
    permutation = np.random.default_rng(0).permutation(16)
    rows, base = jnp.zeros((3, 5, 4)), jnp.zeros((3, 5, 16))
    anchor = jnp.asarray([3, 7, 0], jnp.int32)
    static = {"vocab": 16, "top_k": top_k, "impl": impl}
    chain = dspark.decide(permuting(permutation), rows, base, anchor, **static)
    want = [list(anchor)]
    for _ in range(5):
        want.append([permutation[token] for token in want[-1]])
    np.testing.assert_array_equal(np.asarray(chain.tokens).T, want[1:])


def test_a_drawn_draft_says_the_distribution_that_it_was_drawn_from():
    """B18's sibling: q is exact over all tokens, and over candidates where the chain is cut."""
    permutation = np.random.default_rng(0).permutation(16)
    draft, rng = permuting(permutation), np.random.default_rng(1)
    rows, base = jnp.zeros((2, 3, 4)), jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)
    anchor = jnp.asarray([3, 7], jnp.int32)
    temperature = jnp.asarray([[0.7] * 3, [0.0] * 3], jnp.float32)
    draws = Draws(jnp.asarray(rng.uniform(size=(2, 3)), jnp.float32), temperature)
    for top_k in (0, 4):
        chain = dspark.decide(draft, rows, base, anchor, draws, vocab=16, top_k=top_k)
        tokens = np.asarray(chain.tokens)
        if top_k:
            q = np.zeros((2, 3, 16))
            np.add.at(q, (*np.indices(chain.q.ids.shape)[:2], chain.q.ids), chain.q.probs)
        else:
            q = np.asarray(chain.q)
        before = np.concatenate([np.asarray(anchor)[:, None], tokens[:, :-1]], axis=1)
        logits = np.asarray(base, np.float64)
        if top_k:
            weakest = np.sort(logits, axis=-1)[..., [-top_k]]
            logits = np.where(logits >= weakest, logits, -np.inf)
        np.put_along_axis(
            logits,
            permutation[before][..., None],
            np.take_along_axis(logits, permutation[before][..., None], axis=-1) + 1.0,
            axis=-1,
        )
        want = np.exp(logits[0] / 0.7)
        np.testing.assert_allclose(q[0], want / want.sum(-1, keepdims=True), atol=1e-6)
        np.testing.assert_array_equal(q[1], np.eye(16)[logits[1].argmax(-1)])
        assert (np.take_along_axis(q, tokens[..., None], axis=-1) > 0).all()


SPARK = drafter_config("dspark", target_config("qwen3", 3, False, "float32"), 8)


def spark(**nested):
    return SPARK | {"dflash_config": SPARK["dflash_config"] | nested}


@pytest.mark.parametrize(
    "heads",
    [
        {"markov_rank": 0, "confidence_head_with_markov": False, "enable_confidence_head": False},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"enable_confidence_head": False},
        {"confidence_head_with_markov": False, "markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
    ],
    ids=["neither", "confidence", "markov", "hidden-only", "both"],
)
def test_any_mixture_of_heads_loads_and_traces(heads, tmp_path):
    """B20; the golden cases compute most of them."""
    at = write_tiny_pair(tmp_path, drafter="dspark", draft_config={"dflash_config": heads})
    target = dj.load_target(at.target)
    params = dj.Params(target, dj.load_drafter(at.drafter, target))
    facts = SPARK["dflash_config"] | heads
    scratch = kit.carriers(params, kit.sizes(params, 2), [])[2]
    assert (scratch.markov_bias is None) == (facts["markov_rank"] == 0)
    assert (scratch.conf_out is None) == (not facts["enable_confidence_head"])
    fixed = kit.sizes(params, 2)
    carriers = kit.carriers(params, fixed, [])
    loop.step.eval_shape(params, *carriers, fixed=fixed, options=kit.OPTIONS)


@pytest.mark.parametrize(
    ("nested", "error", "message"),
    [
        ({"markov_rank": 0}, ValueError, "confidence_head_with_markov is true, but markov_rank"),
        ({"markov_head_type": "lstm"}, NotImplementedError, "'lstm' is not supported, wanted one"),
        ({"markov_rank": -1}, ValueError, "markov_rank"),
        ({"block_size": 0}, ValueError, "block_size 0, wanted at least 1"),
    ],
    ids=["contradiction", "unknown", "negative", "no-rows"],
)
def test_heads_that_cannot_be_are_refused_in_one_sentence(nested, error, message):
    """B20."""
    with pytest.raises(error, match=message):
        DraftConfig.from_hf(spark(**nested))


def test_an_option_of_the_chain_is_refused_by_drafters_without_one():
    for kind, top_k, message in (
        ("dflash", 4, "the dflash drafter has no Markov head"),
        ("dspark", 17, "markov_top_k is 17, wanted 0"),
    ):
        params = kit.pair(kind=kind).params
        with pytest.raises(ValueError, match=message):
            dj.generate(params, [[1, 2, 3]], markov_top_k=top_k)


def test_a_confidence_that_is_not_a_number_drafts_nothing_and_is_said():
    """B22, end to end: the answer is the target's own."""
    params = kit.pair(kind="dspark", layers="one").params
    broken = params.draft.confidence.replace(bias=jnp.full((1,), jnp.nan))
    broken = with_threshold(params.draft.replace(confidence=broken), 0.0)
    ask = {"max_new_tokens": 12, "page_size": 4, "max_context": 32, "eos_ids": []}
    with pytest.warns(
        RuntimeWarning, match="dspark drafter's numbers were not finite in prompt 0;"
    ):
        got = dj.generate(params.replace(draft=broken), [kit.prompt(9)], **ask)
    assert all(count == 0 for count in np.concatenate(got[0].stats.proposed))
    text = [*kit.prompt(9), *got[0].ids]
    best = kit.pair(kind="dspark", layers="one").target.forward(text[:-1]).logits.argmax(-1)
    assert list(got[0].ids) == best[8:].tolist()


def test_a_head_may_read_the_hidden_row_before_the_final_norm():
    """B12; that it reads the one after it by default is in what a step leaves in the scratch."""
    assert not kit.pair(kind="mtp", layers="one").params.draft.config.reads_residual
    pair = kit.pair(kind="mtp", layers="residual")
    assert pair.params.draft.config.reads_residual
    fixed = kit.sizes(pair.params, 3, max_context=64)
    requests = [kit.Request(kit.prompt(n), 20) for n in (3, 21, 40)]
    firsts, at = kit.start(pair.params, fixed, requests)
    out, *_ = loop.step(pair.params, *at, fixed=fixed, options=kit.OPTIONS)
    for row, (one, first) in enumerate(zip(requests, firsts, strict=True)):
        text = [*one.prompt, int(first.token)]
        seen = pair.target.forward(text[:-1])
        drafts, _, logits = pair.drafter.draft(seen.hidden[-1], text, 7)
        assert out.proposal.tokens[row].tolist() == drafts
        assert np.abs(pair.drafter.draft(seen.normed, text, 1)[2] - logits[:1]).max() > 0.1
