"""`dflash check --sampling`: it says yes to a right pair, and no to a loop that is wrong."""

import json
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import acceptance, cli, commands, sampling_check
from dflash_jax.fixed import plan
from scripts.make_tiny import write_tiny_pair
from tests import kit

SIZES = {"page_size": 16, "max_context": 32}


def pair(kind="dflash"):
    return kit.pair("qwen3", kind, layers="one", block=4).params


@pytest.fixture(scope="module")
def trial():
    return sampling_check.prepare(pair(), kit.prompt(9), temperature=2.0, batch=28, **SIZES)


def test_a_right_pair_follows_its_target(trial):
    assert sum(trial.law.values()) == pytest.approx(1)
    found = sampling_check.judge(trial, samples=250, batch=50, draft_sampling=True, **SIZES)
    assert found.holds and found.p_value > 1e-3 and found.tau > 1.1
    assert "follows the target" in str(found) and len(found.vocabulary) == 4
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_residual_that_forgets_q_is_found(trial, monkeypatch):
    # Another batch has a trace of its own.
    monkeypatch.setattr(acceptance, "_residual", lambda p, q, row: p)
    found = sampling_check.judge(trial, samples=320, batch=64, draft_sampling=True, **SIZES)
    assert not found.holds and "DOES NOT FOLLOW" in str(found)


def test_counts_are_judged_by_what_the_law_expects():
    law = {(0,): 0.5, (1,): 0.3, (2,): 0.197, (3,): 0.003}
    near = Counter({(0,): 510, (1,): 290, (2,): 198, (3,): 2})
    statistic, degrees, p_value = sampling_check.chi_square(near, law)
    assert degrees == 3 and p_value > 0.5  # the rare one and its like make a bin
    assert statistic == pytest.approx(0.2 + 1 / 3 + 1 / 197 + 1 / 3)
    far = Counter({(0,): 400, (1,): 400, (2,): 197, (3,): 3})
    assert sampling_check.chi_square(far, law)[2] < 1e-6
    assert sampling_check.chi_square(near + Counter({(9,): 1}), law)[2] == 0


def test_a_cut_pair_has_the_rows_that_were_named_and_its_mask_behind_them():
    params = pair("dspark")
    cut = sampling_check.cut_vocabulary(params, (2, 5, 9))
    rows = [2, 5, 9, params.draft.config.mask_id]
    np.testing.assert_array_equal(cut.target.lm_head, params.target.lm_head[jnp.array(rows)])
    np.testing.assert_array_equal(cut.draft.markov.out, params.draft.markov.out[jnp.array(rows)])
    assert (cut.target.config.real_vocab, cut.draft.config.mask_id) == (3, 3)


def of_a_part(params, ids):
    """The pair with a head of its own over `ids`, in this order."""
    draft, columns = params.draft, np.asarray(ids)
    markov = draft.markov
    return params.replace(
        draft=draft.replace(
            head=params.target.lm_head[columns],
            d2t=jnp.asarray(columns, jnp.int32),
            markov=None if markov is None else markov.replace(out=markov.out[columns]),
            config=replace(draft.config, draft_vocab=len(columns), has_head=True),
        )
    )


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_a_head_of_a_part_of_the_vocabulary_keeps_what_it_knows(kind):
    params = of_a_part(pair(kind), [40, 9, 3, 2])
    cut = sampling_check.cut_vocabulary(params, (2, 5, 9))
    assert cut.draft.d2t.tolist() == [2, 0] and cut.draft.d2t.dtype == jnp.int32
    np.testing.assert_array_equal(cut.draft.head, params.draft.head[jnp.array([1, 3])])
    assert cut.draft.config.draft_vocab == 2 and cut.draft.config.selector_top_k in (0, 2)
    rows = jnp.array([2, 5, 9, params.draft.config.mask_id])
    if kind == "dspark":
        markov, whole = cut.draft.markov, params.draft.markov
        np.testing.assert_array_equal(markov.out, whole.out[jnp.array([1, 3])])
        np.testing.assert_array_equal(markov.embed, whole.embed[rows])
    else:
        assert len(cut.draft.selector.successor) == len(rows)
    with pytest.raises(ValueError, match=r"knows 4 ids, and none of the tokens \[5, 7\] that the"):
        sampling_check.cut_vocabulary(params, (5, 7))


def test_a_head_of_the_first_ids_needs_no_map_until_it_is_cut():
    params = of_a_part(pair(), range(8))
    params = params.replace(draft=params.draft.replace(d2t=None))
    cut = sampling_check.cut_vocabulary(params, (2, 5, 9))
    assert cut.draft.d2t.tolist() == [0, 1] and len(cut.draft.head) == 2


def test_a_pair_with_an_id_map_follows_its_target_too(trial):
    """Two of the four tokens are never drafted, so their residuals carry all of their mass."""
    left = [trial.vocabulary[3], trial.vocabulary[1]]
    cut = sampling_check.cut_vocabulary(of_a_part(pair(), left), trial.vocabulary)
    mapped = replace(trial, params=cut)
    found = sampling_check.judge(mapped, samples=250, batch=50, draft_sampling=True, **SIZES)
    assert found.holds and found.p_value > 1e-3 and found.tau > 1


def test_a_cut_pair_of_a_head_without_tables_can_still_be_planned():
    params = sampling_check.cut_vocabulary(pair("mtp"), (2, 5, 9))
    fixed = plan(params.target.config, params.draft.config, max_context=32)
    assert fixed.logits.shape[1] == fixed.draft.vocab == 3


def test_a_law_of_few_outcomes_is_no_check(trial):
    sure = replace(trial, law={(0, 0, 0): 0.99, (0, 0, 1): 0.01})
    with pytest.raises(ValueError, match="too few sequences of 3 tokens to tell anything by 400"):
        sampling_check.judge(sure, **SIZES)


def test_what_cannot_be_checked_is_refused_by_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands, "keep_executables", lambda: None)  # a setting of the process
    at = write_tiny_pair(tmp_path)
    models = ["--target", str(at.target), "--drafter", str(at.drafter), "--max-context", "32"]
    assert cli.main(["check", "--sampling", *models, "--temperature", "0"]) == 2
    assert "vocabulary is 4 and temperature 0.0, wanted" in capsys.readouterr().err
    # Its law would take a number of prompts that no memory holds.
    assert cli.main(["check", "--sampling", *models, "--vocabulary", "100000"]) == 2
    assert "vocabulary is 100000 and temperature 3.0, wanted 2 to 32" in capsys.readouterr().err
    assert cli.main(["check", "--sampling", *models, "--temperature", "inf"]) == 2
    assert "looking for tokens" not in (err := capsys.readouterr().err) and "inf, wanted" in err
    assert cli.main(["check", "--sampling", "--target", str(at.target), "--drafter", "none"]) == 2
    assert "drafter none drafts nothing of its own" in capsys.readouterr().err
    lookup = ["check", "--sampling", "--target", str(at.target), "--drafter", "prompt_lookup"]
    assert cli.main([*lookup, "--draft-sampling"]) == 2
    assert "no distribution to draw from" in (err := capsys.readouterr().err)
    assert cli.main(["check", "--sampling", *models, "--num-drafts", "99"]) == 2
    assert "num_drafts is 99" in (err := err + capsys.readouterr().err)
    assert "looking for tokens" not in err
    assert cli.main(["check", *models]) == 2  # what to check is not said
