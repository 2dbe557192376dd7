"""Known fault A28: a drafter's own embedding, head and id map are used, in every drafter.

About 15 CPU seconds.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.drafters import vocabulary
from dflash_jax.pairs import check_pair
from dflash_jax.scratch import scratch_specs
from pallas_kernels import MASK_VALUE
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def permuted(params, seed=0):
    """The same drafter with tables of its own, its head's ids in another order."""
    draft, target = params.draft, params.target
    order = np.random.default_rng(seed).permutation(draft.config.vocab).astype(np.int32)
    markov = draft.markov
    return params.replace(
        draft=draft.replace(
            embed=target.embed.at[draft.config.mask_id].set(jnp.nan),
            mask_embed=target.embed[draft.config.mask_id],
            head=target.lm_head[order],
            d2t=jnp.asarray(order),
            markov=None if markov is None else markov.replace(out=markov.out[order]),
            config=replace(draft.config, has_embed=True, has_head=True),
        )
    )


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_permuted_head_with_its_map_drafts_the_same_tokens(kind):
    """The first block against the reference, which shares its target's tables; then the law."""
    pair = kit.pair(kind=kind, layers="one")
    params = permuted(pair.params)
    fixed = kit.sizes(params, 1, max_context=64)
    prompt = kit.prompt(13)
    firsts, at = kit.start(params, fixed, [kit.Request(prompt, 24)])
    copy = jax.tree.map(jnp.copy, at)
    cycle = next(kit.cycles(params, fixed, at))
    want = kit.reference_block(
        pair, [*prompt, int(firsts[0].token)], params.draft.config.block_rows
    )
    assert cycle.out.proposal.tokens[0].tolist() == want.drafts
    logits = np.asarray(cycle.after[2].logits)
    kit.assert_close(logits, want.logits[:, np.asarray(params.draft.d2t)], "logits")
    drafted = kit.by_steps(params, fixed, firsts, jax.tree.map(jnp.copy, copy))
    state, *rest = copy
    plain = state.replace(keep=jnp.zeros_like(state.keep)), *rest
    plain = kit.by_steps(params, fixed, firsts, plain)
    assert drafted.tokens == plain.tokens and drafted.hashes == plain.hashes
    assert max(drafted.accepted[0]) > 0


def test_what_a_drafter_has_of_its_own_goes_before_its_targets():
    params = kit.pair(kind="dflash", layers="one").params
    target, shared = params.target, params.draft
    ids = jnp.asarray([3, shared.config.mask_id], jnp.int32)
    rows = jax.random.normal(jax.random.key(0), (2, 64))
    embed, head = target.embed + 1, target.lm_head[:100]
    own = shared.replace(embed=embed, head=head)
    np.testing.assert_array_equal(
        vocabulary.embed_block(shared, target, ids), target.embed[np.asarray(ids)]
    )
    np.testing.assert_array_equal(vocabulary.embed_block(own, target, ids), embed[np.asarray(ids)])
    masked = own.replace(mask_embed=embed[7], config=replace(own.config, input_embedding_scale=2.0))
    np.testing.assert_array_equal(
        vocabulary.embed_block(masked, target, ids), 2 * embed[np.asarray([3, 7])]
    )
    logits = vocabulary.draft_logits(shared, target, rows)
    kit.assert_close(vocabulary.draft_logits(own, target, rows), logits[:, :100])


def test_columns_beyond_the_targets_vocabulary_are_cut_off():
    params = kit.pair(kind="dflash", layers="one").params
    target = params.target
    wide = jnp.concatenate([target.lm_head, jnp.ones((13, 64), jnp.float32)])
    config = replace(params.draft.config, vocab=320, has_embed=True, has_head=True)
    draft = params.draft.replace(head=wide, embed=wide, config=config)
    logits = vocabulary.draft_logits(draft, target, jnp.ones((1, 64), jnp.float32))
    assert logits.shape == (1, 307) and vocabulary.num_choices(draft, target) == 307
    fixed = kit.sizes(params.replace(draft=draft), 1, max_context=64)
    assert scratch_specs(config, fixed)["logits"].shape == (7, 307)
    with pytest.raises(ValueError, match="320 is above the target's 307, which is not supported"):
        check_pair(target.config, replace(config, draft_vocab=100))


def test_padding_of_the_targets_vocabulary_is_not_chosen_through_a_map():
    params = kit.pair(kind="dflash", layers="one").params
    target = params.target.replace(config=replace(params.target.config, real_vocab=200))
    shared = params.draft
    assert vocabulary.num_choices(shared, target) == 200
    short = shared.replace(head=target.lm_head[:100])
    assert vocabulary.num_choices(short, target) == 100
    ids = jnp.arange(150, 250, dtype=jnp.int32)
    mapped = short.replace(d2t=ids)
    assert vocabulary.num_choices(mapped, target) == 100
    logits = vocabulary.draft_logits(mapped, target, jnp.ones((1, 64), jnp.float32))
    assert (np.asarray(logits)[0] == np.float32(MASK_VALUE)).tolist() == [False] * 50 + [True] * 50
    chosen = jnp.asarray([[0, 99]], jnp.int32)
    np.testing.assert_array_equal(vocabulary.target_ids(mapped, chosen), [[150, 249]])
    assert vocabulary.target_ids(short, chosen) is chosen
