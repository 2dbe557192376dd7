"""Matrices of layers as `[in, out]`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import generate, models, turn_weights
from dflash_jax.cli import build_parser
from dflash_jax.export import drafter_tensors
from dflash_jax.layers import linear, swiglu
from dflash_jax.params import ByInput, DraftParams
from dflash_jax.prompts import Request
from scripts.make_tiny import write_tiny_pair
from tests import kit


def copy_of(params):
    return jax.tree.map(lambda x: x + 0, params)


@pytest.mark.parametrize(("target", "drafter"), [("qwen3", "dflash2"), ("qwen3_next", "mtp")])
def test_turned_weights_decode_to_the_same_tokens(target, drafter):
    params = kit.pair(target, drafter, layers="one").params
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9]]
    options = {"max_new_tokens": 12, "batch": 2, "max_context": 64, "page_size": 16, "eos_ids": []}
    want = [x.ids for x in generate(params, prompts, **options)]
    turned = turn_weights(copy_of(params))
    assert [x.ids for x in generate(turned, prompts, **options)] == want


def test_every_matrix_of_a_layer_is_turned_once_and_given_up():
    given = copy_of(kit.pair().params)
    before = jax.tree.map(np.asarray, given)
    turned = turn_weights(given)
    for old, kept, new in zip(
        (*given.target.layers, *given.draft.layers),
        (*before.target.layers, *before.draft.layers),
        (*turned.target.layers, *turned.draft.layers),
        strict=True,
    ):
        for name in ("qkv", "o", "gate_up", "down"):
            np.testing.assert_array_equal(getattr(new, name).array, getattr(kept, name).T)
            assert getattr(old, name).is_deleted()
        assert new.input_norm is old.input_norm
    draft = turned.draft
    assert isinstance(draft, DraftParams)
    assert isinstance(draft.fc, ByInput) and isinstance(draft.fused_kv, ByInput)
    assert turned.target.lm_head is given.target.lm_head
    again = turn_weights(turned)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, again, turned))


def test_shapes_alone_can_be_turned():
    layer = kit.pair().params.target.layers[0]
    turned = jax.eval_shape(turn_weights, layer)
    assert turned.down.array.shape == layer.down.shape[::-1]
    assert not layer.down.is_deleted()


@pytest.mark.parametrize(
    ("backend", "impl", "is_turned"),
    [("gpu", "auto", True), ("gpu", "xla", True), ("gpu", "pallas", False), ("cpu", "auto", False)],
)
def test_the_command_line_turns_what_it_loads_where_that_pays(
    tmp_path, monkeypatch, backend, impl, is_turned
):
    at = write_tiny_pair(tmp_path)
    argv = ["decode", "--target", str(at.target), "--drafter", str(at.drafter), "--impl", impl]
    args = build_parser().parse_args([*argv, "--prompt-ids", "1,2", "--dtype", "float32"])
    args.requests = [Request(ids=args.prompt_ids)]
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    pair = models.load(args).pair()
    assert isinstance(pair.draft, DraftParams)
    matrices = pair.target.layers[0].qkv, pair.draft.layers[0].down, pair.draft.fc
    assert [isinstance(x, ByInput) for x in matrices] == [is_turned] * 3


def test_what_is_no_weights_is_refused():
    with pytest.raises(TypeError, match="params is a dict, wanted Params"):
        turn_weights({"qkv": np.zeros((2, 2))})


def test_turned_weights_have_no_kernel_and_no_export():
    turned = turn_weights(copy_of(kit.pair().params))
    layer, rows = turned.target.layers[0], jnp.zeros((2, turned.target.config.width))
    for call, weight in ((linear, layer.qkv), (swiglu, layer.gate_up)):
        with pytest.raises(NotImplementedError, match=r"no kernel for a weight \[in, out\]"):
            call(rows, weight, impl="interpret")
    with pytest.raises(NotImplementedError, match="'triton' has no kernel for a weight"):
        linear(rows, layer.qkv, impl="triton")
    with pytest.raises(ValueError, match="the dflash2 drafter's weights are turned"):
        drafter_tensors(turned.draft)
