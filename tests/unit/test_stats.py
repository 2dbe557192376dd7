import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from dflash_jax.stats import Stats


def one(accepted, *, proposed=None, committed=None, num_drafts=3, seconds=2.0, drafter="dflash"):
    accepted = np.asarray(accepted, np.int32)
    proposed = np.full_like(accepted, num_drafts) if proposed is None else np.asarray(proposed)
    committed = accepted + 1 if committed is None else np.asarray(committed)
    return Stats(
        drafter=drafter,
        num_drafts=num_drafts,
        accepted=(accepted,),
        committed=(committed,),
        proposed=(proposed,),
        drafted=(np.zeros((accepted.size, num_drafts), np.int32),),
        num_tokens=(1 + int(committed.sum()),),
        finish_reasons=("stop",),
        prompt_tokens=(5,),
        ttft_seconds=(0.25,),
        decode_seconds=seconds,
        compile_seconds=1.5,
    )


def test_tau_counts_the_bonus_token_and_accepted_does_not():
    stats = one([0, 3, 1, 2])
    assert stats.tau == 2.5 and stats.accepted_per_cycle == 1.5
    assert stats.draft_acceptance_rate == 6 / 12
    assert "bonus token included" in str(stats)


def test_a_stop_inside_a_block_lowers_tau_and_not_the_accepted_drafts():
    # The third cycle accepted two drafts, the second of which was a stop token: no bonus.
    assert one([1, 2, 2], committed=[2, 3, 2]).tau == 7 / 3


def test_acceptance_by_position_is_conditional_and_cumulative():
    conditional, cumulative = one([0, 3, 1, 2]).acceptance_by_position()
    assert cumulative.tolist() == [3 / 4, 2 / 4, 1 / 4]
    assert conditional.tolist() == [3 / 4, 2 / 3, 1 / 2]


def test_positions_that_were_not_proposed_do_not_count_against_the_drafter():
    conditional, cumulative = one([1, 1], proposed=[1, 3]).acceptance_by_position()
    assert cumulative[:2].tolist() == [1.0, 0.0]
    assert conditional[1] == 0.0 and np.isnan(conditional[2])


def test_the_histogram_has_a_bin_for_every_count():
    assert one([0, 2, 2]).histogram().tolist() == [1, 0, 2, 0]


def test_speed_leaves_out_first_token_and_compile_time():
    assert one([1, 1], seconds=2.0).tokens_per_second == 4 / 2.0


def test_one_of_a_thing_is_in_the_singular():
    stats = one([1], num_drafts=1)
    assert "drafter dflash: 1 cycle of up to 1 draft\n" in str(stats)
    assert "in 1 answer " in str(stats) and stats.title() in str(stats)
    assert "2 cycles of up to 3 drafts" in one([1, 2]).title()


def test_nothing_decoded_gives_no_figures_and_still_prints():
    stats = one([], seconds=0.0)
    assert np.isnan(stats.tau) and np.isnan(stats.tokens_per_second)
    assert json.loads(stats.to_json())["tau"] is None
    assert "tau" in str(stats)


@pytest.mark.parametrize(
    "accepted, cycles, warns",
    [(1, 50, True), (1, 49, False), (2, 50, False)],
    ids=["low-and-long", "low-and-short", "high"],
)
def test_a_collapsed_acceptance_is_said(accepted, cycles, warns):
    stats = one([accepted] * cycles)
    assert (stats.warning is not None) == warns
    assert ("low acceptance" in str(stats)) == warns
    assert (json.loads(stats.to_json())["warning"] is not None) == warns


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (None, "; is drafter 'dflash' made"),
        ({"is_random": True, "samples_drafts": False}, "draft_sampling draws drafts too; is"),
        ({"is_random": True, "samples_drafts": True}, "a text that is drawn is hard to guess"),
    ],
)
def test_a_low_acceptance_at_a_temperature_is_explained_by_it(mode, said):
    assert said in replace(one([1] * 50), settings={"sampling": mode}).warning


def test_plain_decoding_never_warns_and_prints_no_drafter_figures():
    stats = one([0] * 60, num_drafts=0, drafter="none")
    assert stats.warning is None and "tau" not in str(stats)
    assert stats.acceptance_by_position()[0].size == 0


def test_merging_joins_sequences_and_adds_times():
    merged = Stats.merged([one([0, 3]), one([1], seconds=1.0)])
    assert merged.tau == 7 / 3 and merged.num_tokens == (6, 3)
    assert merged.decode_seconds == 3.0 and merged.compile_seconds == 3.0
    assert Stats.merged([one([0]), one([1])], decode_seconds=2.0).decode_seconds == 2.0


def test_merging_different_drafters_is_refused():
    with pytest.raises(ValueError, match="different drafters"):
        Stats.merged([one([0]), one([0], drafter="dflash2")])
    with pytest.raises(ValueError, match="no parts"):
        Stats.merged([])


def test_json_is_one_line_with_definitions_and_every_cycle():
    text = one([0, 3]).to_json()
    record = json.loads(text)
    assert "\n" not in text
    assert record["accepted"] == [[0, 3]] and "bonus" in record["definitions"]["tau"]
    assert record["acceptance_by_position"]["cumulative"] == [0.5, 0.5, 0.5]


def test_a_notebook_shows_the_table_and_draws_the_plot():
    stats = one([0, 3, 1])
    page = stats._repr_html_()
    assert page.startswith("<pre") and "tau" in page and "bonus token" in page
    figure = stats.plot()
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "draft position j",
        "drafts accepted in a cycle",
    ]
    assert [bar.get_height() for bar in figure.axes[1].patches] == [1, 1, 0, 1]
    assert figure._repr_png_().startswith(b"\x89PNG")  # without pyplot nothing else shows it
    assert one([0, 0], proposed=[0, 0], num_drafts=0).plot()._repr_png_()


def test_stats_and_pages_import_neither_jax_nor_plotting():
    code = (
        "import sys, dflash_jax.stats, dflash_jax.pages\n"
        "print([m for m in ('jax', 'rich', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
