"""What a golden folder runs, skips by name, and fails: with a folder made by hand."""

import json

import pytest

from tests.golden.manifest import NOT_BUILT_FAMILIES, NOT_BUILT_KINDS, check_of, discover


@pytest.fixture
def golden(tmp_path):
    """One folder: a trained target, a drafter's run on it, and cases that are not built."""
    cases = [
        {"name": "any_name", "kind": "target_trained"},
        {"name": "run", "kind": "dflash_spec_generate", "target_ckpt": "../any_name/target"},
        {"name": "hybrid", "kind": "target"},
        {"name": "new", "kind": "tree"},
        {"name": "unheard", "kind": "something_else", "weights_dtype": "bfloat16"},
    ]
    for name, model_type in (("any_name", "qwen3"), ("hybrid", "qwen3_next")):
        folder = tmp_path / "cases" / name / "target"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "cases": cases}))
    return {case.name: case for case in discover(tmp_path)}


def test_cases_are_found_in_the_manifests_order(golden):
    assert list(golden) == ["any_name", "run", "hybrid", "new", "unheard"]


def test_a_shared_target_is_followed(golden):
    assert golden["run"].target_folder == golden["any_name"].target_folder
    assert golden["run"].family == "qwen3"
    assert golden["unheard"].family is None


def test_built_cases_run(golden):
    assert golden["any_name"].reason_to_skip() is None
    assert golden["run"].reason_to_skip() is None


def test_kinds_and_families_that_are_not_built_say_so(golden, monkeypatch):
    monkeypatch.setitem(NOT_BUILT_KINDS, "tree", "trees are not built yet")
    monkeypatch.setitem(NOT_BUILT_FAMILIES, "qwen3_next", "hybrids are not built yet")
    assert "hybrids" in golden["hybrid"].reason_to_skip()
    assert "trees" in golden["new"].reason_to_skip()


def test_an_unheard_kind_runs_and_fails_by_name(golden):
    case = golden["unheard"]
    assert case.reason_to_skip() is None
    with pytest.raises(pytest.fail.Exception, match="unheard.*something_else"):
        check_of(case, {"target": print})


def test_bf16_is_told_by_the_weights(golden):
    assert golden["unheard"].is_bf16
    assert not golden["run"].is_bf16
