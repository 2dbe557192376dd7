"""The reference's own layers against what can be said by hand."""

import json
import math
import struct

import numpy as np
import pytest

from tests.reference import checkpoint, dflash, dflash2, layers

ROPE = {"rope_theta": 10000.0, "max_position_embeddings": 64}


def rope(**scaling):
    return {**ROPE, "rope_scaling": scaling}


def test_rotation_turns_the_pair_of_both_halves_by_position_times_frequency():
    x = np.zeros((1, 1, 8))
    x[0, 0, 1] = 1.0
    turned = layers.rotate(x, [5], *layers.rope_frequencies(ROPE, 8))[0, 0]
    angle = 5 * 10000.0 ** (-2 / 8)
    np.testing.assert_allclose(turned[[1, 5]], [math.cos(angle), math.sin(angle)], atol=1e-14)
    assert not np.any(np.delete(turned, [1, 5]))


def test_rotated_products_depend_on_the_distance_alone():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 16))
    frequencies = layers.rope_frequencies(ROPE, 16)
    near = layers.rotate(q, [9], *frequencies) @ layers.rotate(k, [2], *frequencies).swapaxes(1, 2)
    far = layers.rotate(q, [907], *frequencies) @ layers.rotate(k, [900], *frequencies).swapaxes(
        1, 2
    )
    np.testing.assert_allclose(near, far, atol=1e-12)


def test_linear_rope_divides_every_frequency():
    plain, _ = layers.rope_frequencies(ROPE, 16)
    scaled, factor = layers.rope_frequencies(rope(type="linear", factor=4.0), 16)
    np.testing.assert_allclose(scaled, plain / 4)
    assert factor == 1


def test_llama3_rope_keeps_fast_bands_and_stretches_slow_ones():
    plain, _ = layers.rope_frequencies(ROPE, 32)
    scaled, _ = layers.rope_frequencies(
        rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=64), 32)  # fmt: skip
    assert scaled[0] == plain[0]  # 64 / (2 pi) = 10 turns, more than 4
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8)  # far less than one turn
    assert np.any((scaled < plain * 0.99) & (scaled > plain / 8 * 1.01))  # some are blended


def test_yarn_scales_slow_bands_and_the_products():
    plain, _ = layers.rope_frequencies(ROPE, 32)
    scaled, factor = layers.rope_frequencies(rope(rope_type="yarn", factor=4.0), 32)
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 4)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    given = rope(rope_type="yarn", factor=4.0, attention_factor=1.0)
    assert layers.rope_frequencies(given, 32)[1] == 1.0


def test_unknown_rope_type_is_named():
    with pytest.raises(NotImplementedError, match="longrope"):
        layers.rope_frequencies(rope(rope_type="longrope"), 32)


@pytest.mark.parametrize(
    ("is_causal", "window", "wanted"),
    [
        (True, None, ["xx..", "xxx.", "xxxx"]),
        (False, None, ["xxxx", "xxxx", "xxxx"]),
        (True, 2, ["xx..", ".xx.", "..xx"]),
        (False, 2, ["xxx.", ".xxx", "..xx"]),
    ],
    ids=["causal", "all", "causal-window", "window"],
)
def test_mask_by_absolute_positions(is_causal, window, wanted):
    allowed = layers.visible([11, 12, 13], [10, 11, 12, 13], is_causal, window)
    assert ["".join("x" if seen else "." for seen in row) for row in allowed] == wanted


def test_grouped_heads_read_their_own_kv_head():
    q, k = np.ones((1, 4, 2)), np.ones((1, 2, 2))
    v = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    mixed = layers.attention(q, k, v, np.ones((1, 1), bool))
    np.testing.assert_array_equal(mixed, [[1, 2, 1, 2, 3, 4, 3, 4]])


def test_masked_keys_change_nothing():
    q, k, v = np.random.default_rng(1).normal(size=(3, 6, 2, 4))
    allowed = layers.visible(range(6), range(6), is_causal=True)
    mixed = layers.attention(q, k, v, allowed)
    k[4:], v[4:] = 1e6, -1e6
    np.testing.assert_array_equal(layers.attention(q, k, v, allowed)[:4], mixed[:4])


def test_bf16_rounding_is_to_nearest_even():
    one = 1.0
    ulp = 2.0**-7
    x = np.array([one + ulp / 2, one + 3 * ulp / 2, one + 0.6 * ulp, -one - ulp / 2], np.float32)
    wanted = [one, one + 2 * ulp, one + ulp, -one]
    np.testing.assert_array_equal(checkpoint.round_to_bf16(x), np.array(wanted, np.float32))


def test_hand_written_safetensors_are_read(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8]},
    }
    text = json.dumps(header).encode()
    blob = struct.pack("<Q", len(text)) + text + struct.pack("<HHf", 0x3F80, 0xC000, 0.5)
    (tmp_path / "model.safetensors").write_bytes(blob)
    tensors = checkpoint.read_tensors(tmp_path)
    np.testing.assert_array_equal(tensors["a"], np.array([1.0, -2.0], np.float32))
    np.testing.assert_array_equal(tensors["b"], [[0.5]])


def test_window_needs_use_sliding_window_and_a_sliding_layer():
    raw = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
    }
    assert dflash.layer_windows(raw, {}) == (12, None)
    assert dflash.layer_windows({**raw, "use_sliding_window": False}, {}) == (None, None)
    assert dflash.layer_windows(raw, {"use_swa": True, "swa_window_size": 9}) == (9, 9)


@pytest.mark.parametrize(
    ("top", "nested", "wanted"),
    [
        ({}, {}, (True, False)),
        ({"is_causal": False}, {}, (False, False)),
        ({}, {"causal": True}, (True, True)),
        ({"is_causal": False}, {"causal": True}, (False, False)),
    ],
    ids=["absent", "top", "nested", "top-wins"],
)
def test_causality_is_stated_or_follows_from_the_window(top, nested, wanted):
    raw = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], **top}
    assert dflash.layer_causality(raw, nested) == wanted


def test_second_tap_delays_by_one_row_inside_the_block():
    x = np.random.default_rng(2).normal(size=(5, 8))
    base = np.stack([np.zeros(8), np.ones(8)])
    delayed = dflash2.causal_conv(x, np.zeros((5, 2, 2)), base)
    np.testing.assert_array_equal(delayed, np.concatenate([np.zeros((1, 8)), x[:-1]]))


def test_a_group_of_the_dynamic_kernel_reaches_only_its_channels():
    x, dynamic = np.ones((3, 8)), np.zeros((3, 2, 4))
    dynamic[1, 0, 2] = 5.0
    moved = dflash2.causal_conv(x, dynamic, np.zeros((2, 8)))
    assert np.argwhere(moved).tolist() == [[1, 4], [1, 5]]


def test_equal_scores_choose_the_lowest_token_id():
    selector = {
        "hidden_projection": np.zeros((2, 4)),
        "predecessor_codebook": np.zeros((9, 2)),
        "successor_codebook": np.zeros((9, 2)),
    }
    logits = np.array([[0, 3, 1, 3, 0, 3, 0, 0, 0.0]])
    walk = dflash2.walk(np.zeros((1, 4)), logits, 0, selector, 4)
    assert walk.candidates[0].tolist() == [1, 3, 5, 2]
    assert walk.drafts == [1]


def test_walk_follows_the_chosen_predecessor():
    """Codebooks that reward 'successor = predecessor + 1' make a staircase from the anchor."""
    vocab = 8
    selector = {
        "hidden_projection": np.ones((vocab, 1)),
        "predecessor_codebook": np.eye(vocab),
        "successor_codebook": np.roll(np.eye(vocab), 1, axis=0),
    }
    walk = dflash2.walk(np.ones((4, 1)), np.zeros((4, vocab)), 2, selector, vocab)
    assert walk.drafts == [3, 4, 5, 6]
