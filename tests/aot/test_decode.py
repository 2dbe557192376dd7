"""What the CUDA compiler makes of the compiled steps for an H200, read without a GPU."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.aot.h200 import missing_reason

_ROOT = Path(__file__).parents[2]
_DECODES = [("tiny", "dflash2"), ("qwen3-8b", "dflash")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or ""),
]


@cache
def compiled(what: str, shapes: str, drafter: str, *more: str) -> dict:
    """Facts about one executable, from a process of its own."""
    command = [sys.executable, "-m", "tests.aot.compile_decode", what, shapes, drafter, *more]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("shapes", "drafter"), _DECODES)
def test_a_decode_chunk_aliases_every_carrier(shapes, drafter):
    facts = compiled("decode", shapes, drafter)
    assert facts["num_aliases"] == facts["num_carriers"]
    assert facts["alias_bytes"] >= facts["carrier_bytes"]


@pytest.mark.parametrize(("shapes", "drafter"), _DECODES)
def test_a_decode_chunk_makes_nothing_as_large_as_a_weight_or_a_pool(shapes, drafter):
    facts = compiled("decode", shapes, drafter)
    assert facts["copied"] == []
    assert facts["large"] == []
    assert facts["vocabulary_rows"] == 16


@pytest.mark.parametrize(("shapes", "drafter"), _DECODES)
def test_a_layer_of_a_decode_chunk_writes_and_attends_in_three_launches(shapes, drafter):
    layers = {"tiny": 8 + 2, "qwen3-8b": 36 + 5}[shapes]
    found = compiled("decode", shapes, drafter)["pallas"]
    assert found["paged_attention_segments"] == found["paged_attention_fold"] == layers
    assert found["norm_rope_cache"] == layers + 1  # one for the context of all drafter layers


@pytest.mark.parametrize(("shapes", "drafter"), _DECODES)
def test_a_cycle_searches_rows_of_the_vocabulary_in_two_launches_a_search(shapes, drafter):
    found = compiled("decode", shapes, drafter)["pallas"]
    searches = {"dflash": 2, "dflash2": 1}[drafter]  # the drafts' and the target's best tokens
    assert found["greedy_rows_chunks"] == found["greedy_rows_join"] == searches
    names = ("top16_maxima", "top16_pick", "selector_walk")
    assert [found.get(name, 0) for name in names] == [int(drafter == "dflash2")] * 3


@pytest.mark.parametrize(("shapes", "drafter"), _DECODES)
def test_products_are_xlas_where_it_measured_faster(shapes, drafter):
    found = compiled("decode", shapes, drafter)["pallas"]
    assert not [name for name in found if "skinny" in name]


@pytest.mark.parametrize(("shapes", "drafter"), _DECODES)
def test_temporary_memory_of_a_decode_chunk_is_less_than_one_layers_pools(shapes, drafter):
    facts = compiled("decode", shapes, drafter)
    assert facts["temp_bytes"] < 2 * facts["pool_bytes"]


@pytest.mark.parametrize(("shapes", "drafter"), _DECODES)
def test_no_sort_or_top_k_in_a_decode_chunk_runs_over_the_vocabulary(shapes, drafter):
    vocab = {"tiny": 4096, "qwen3-8b": 151936}[shapes]
    assert compiled("decode", shapes, drafter)["sorted_columns"] < vocab


def test_a_sampled_decode_is_in_place_and_sorts_nothing():
    """Filters, penalties and draws of every kind, drafts drawn as well."""
    facts = compiled("decode", "tiny", "dflash2", "--sampling")
    assert facts["num_aliases"] == facts["num_carriers"]
    assert facts["alias_bytes"] >= facts["carrier_bytes"]
    assert facts["copied"] == facts["large"] == []
    assert facts["sorted_columns"] == 0


def test_a_decode_that_chooses_its_width_is_in_place_in_every_branch():
    facts = compiled("decode", "tiny", "dspark", "--verify-widths", "1", "4")
    assert facts["num_aliases"] == facts["num_carriers"]
    assert facts["copied"] == facts["large"] == []
    layers = 3 * 8 + 2  # of the target in 1, 4 and all rows, of the drafter in its own
    assert facts["pallas"]["paged_attention_segments"] == layers


def test_a_hybrid_decode_runs_its_states_in_place_and_by_the_kernel():
    """Each layer's state is aliased, by a kernel that stands at a layer's place in the loop."""
    facts = compiled("decode", "tiny-hybrid", "dspark")
    assert facts["num_aliases"] == facts["num_carriers"]
    assert facts["alias_bytes"] >= facts["carrier_bytes"]
    assert facts["copied"] == []
    assert facts["num_gated_delta_rows"] == 4
    found = facts["pallas"]  # each of the seven drafts is one search, and so are the target's rows
    assert found["markov_argmax_tiles"] == found["markov_argmax_join"] == 7
    assert found["greedy_rows_chunks"] == found["greedy_rows_join"] == 1


def test_prefill_aliases_every_carrier_and_copies_no_weight_or_pool():
    facts = compiled("prefill", "tiny", "dflash2")
    assert facts["num_aliases"] == facts["num_carriers"]
    assert facts["alias_bytes"] >= facts["carrier_bytes"]
    assert facts["copied"] == []


def test_prefill_computes_the_logits_of_one_row():
    assert compiled("prefill", "tiny", "dflash2")["vocabulary_rows"] == 1
