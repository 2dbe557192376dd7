import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.safetensors_io import DTYPES, read_checkpoint, read_file, write_file


def write_raw(path, header, data=b"", header_bytes=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data
    )
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_a_hand_written_file_is_bit_exact(tmp_path, name):
    dtype = DTYPES[name]
    raw = bytes([0, 1] * 48) if name == "BOOL" else bytes(range(7, 103))
    shape = (2, 3, len(raw) // dtype.itemsize // 6)
    path = write_raw(tmp_path / "a.safetensors", {"x": entry(name, shape, (0, len(raw)))}, raw)
    x = read_file(path)["x"]
    assert (x.dtype, x.shape) == (dtype, shape)
    assert x.tobytes() == raw
    assert not x.flags.writeable


def test_bfloat16_values_are_numbers_and_not_void(tmp_path):
    path = write_raw(
        tmp_path / "a.safetensors", {"x": entry("BF16", (2,), (0, 4))}, b"\x80\x3f\x20\xc0"
    )
    np.testing.assert_array_equal(read_file(path)["x"].astype(np.float32), [1.0, -2.5])


def test_unaligned_scalar_and_empty_tensors_are_read(tmp_path):
    header = {
        "b": entry("U8", (1,), (0, 1)),
        "s": entry("F32", (), (1, 5)),
        "e": entry("F32", (0, 4), (5, 5)),
    }
    path = write_raw(tmp_path / "a.safetensors", header, b"\x07" + struct.pack("<f", 1.5))
    tensors = read_file(path)
    assert list(tensors) == ["b", "s", "e"]
    assert tensors["s"].shape == () and tensors["s"] == 1.5
    assert tensors["e"].shape == (0, 4)


def test_metadata_and_padding_of_the_header_are_ignored(tmp_path):
    raw = json.dumps({"__metadata__": {"format": "pt"}, "x": entry()}).encode() + b"   "
    path = write_raw(tmp_path / "a.safetensors", raw, np.float32([1, 2]).tobytes())
    assert list(read_file(path)) == ["x"]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": entry(offsets=(0, 8))}, bytes(7), "'x' ends at byte 8 .* holds 7"),
        ({"x": entry(offsets=(0, 8))}, bytes(9), "9 bytes of data, the header describes 8"),
        ({"x": entry(shape=(3,))}, bytes(8), "'x' takes 8 bytes, .* needs 12"),
        ({"x": entry("F4")}, bytes(8), "'x' has dtype 'F4', known are F64"),
        ({"x": entry(["F32"])}, bytes(8), "'x' has dtype"),
        (
            {"x": entry(), "y": entry(offsets=(4, 12))},
            bytes(12),
            "'y' at bytes 4..12 overlaps tensor 'x'",
        ),
        (
            {"x": entry(), "y": entry(offsets=(12, 20))},
            bytes(20),
            "'y' .* leaves a hole after tensor 'x'",
        ),
        ({"x": entry(offsets=(-8, 0))}, bytes(8), "'x' has data_offsets"),
        ({"x": entry(offsets=(8, 0))}, bytes(8), "'x' has data_offsets"),
        ({"x": entry(offsets=(0, 8, 9))}, bytes(8), "'x' has data_offsets"),
        ({"x": entry(offsets=(0, 2**63))}, bytes(8), "'x' takes .* needs 8"),
        ({"x": entry(shape=(-2,))}, bytes(8), "'x' has shape"),
        ({"x": entry(shape=(True, 2))}, bytes(8), "'x' has shape"),
        ({"x": entry(shape=(2**40, 2**40), offsets=(0, 2**82))}, bytes(8), "'x' ends at byte"),
        ({"x": entry(shape=(0, 2**70), offsets=(0, 0))}, b"", "'x' has shape .0, 1180"),
        ({"x": entry(shape=(1,) * 65, offsets=(0, 4))}, bytes(4), "'x' has shape .1, 1"),
        (b'{"x": ' + b"1" * 5000 + b"}", b"", "the header is not JSON"),
        ({"x": [1]}, bytes(8), "'x' is described by"),
        ([1], b"", "header is a JSON list"),
        (b"{", b"", "header is not JSON"),
        (b"\xff\xfe", b"", "header is not JSON"),
        (b"[" * 100_000, b"", "header is not JSON"),
        (
            b'{"x": {"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
            b"",
            "names 'dtype' twice",
        ),
    ],
)
def test_a_hostile_header_is_one_clear_error(tmp_path, header, data, message):
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as error:
        read_file(path)
    assert "bad.safetensors" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header_bytes", "message"),
    [(3, "in a file of 10"), (100_000_001, "the format allows"), (2**64 - 1, "allows")],
)
def test_a_header_longer_than_the_file_or_the_format_is_refused(tmp_path, header_bytes, message):
    path = write_raw(tmp_path / "bad.safetensors", b"{}", header_bytes=header_bytes)
    with pytest.raises(ValueError, match=message):
        read_file(path)


def test_a_missing_or_empty_file_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such safetensors file"):
        read_file(tmp_path / "none.safetensors")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        read_file(tmp_path / "empty.safetensors")


def test_written_files_come_back_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((4, 6)).astype(np.float32)
    tensors = {
        "f32": wide,
        "bf16": wide.astype(ml_dtypes.bfloat16),
        "f16": wide.astype(np.float16),
        "f8": wide.astype(ml_dtypes.float8_e4m3fn),
        "i8": rng.integers(-128, 128, (3, 5), dtype=np.int8),
        "transposed": wide.T,
        "scalar": np.float32(3.0),
    }
    write_file(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    back = read_checkpoint(tmp_path)
    assert set(back) == set(tensors)
    for name, x in tensors.items():
        assert back[name].dtype == x.dtype and back[name].shape == x.shape
        assert back[name].tobytes() == x.tobytes(), name
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_part(tmp_path):
    path = tmp_path / "model.safetensors"
    write_file(path, {"x": np.zeros(2, np.float32)})
    with pytest.raises(Exception, match="c"):
        write_file(path, {"x": np.zeros(2, np.dtype("U3"))})
    assert list(read_file(path)) == ["x"] and os.listdir(tmp_path) == ["model.safetensors"]


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_joined_by_their_index(tmp_path):
    write_file(tmp_path / "a.safetensors", {"x": np.arange(2)})
    write_file(tmp_path / "b.safetensors", {"y": np.arange(3)})
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    assert {k: v.size for k, v in read_checkpoint(tmp_path).items()} == {"x": 2, "y": 3}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "a.safetensors", "y": "c.safetensors"}, "shard c.safetensors is missing"),
        (
            {"x": "a.safetensors", "y": "a.safetensors"},
            "'y' should be in a.safetensors, found nowhere",
        ),
        (
            {"x": "b.safetensors", "z": "a.safetensors"},
            "'x' is in a.safetensors and again in b.safetensors",
        ),
        ({"x": "../a.safetensors"}, "'../a.safetensors' is not a plain file name"),
        ({"x": 3}, "must map tensor names to file names"),
    ],
)
def test_a_broken_index_is_one_clear_error(tmp_path, weight_map, message):
    write_file(tmp_path / "a.safetensors", {"x": np.arange(2)})
    write_file(tmp_path / "b.safetensors", {"x": np.arange(2)})
    write_index(tmp_path, weight_map)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights_lists_what_it_holds(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="neither .* pytorch_model.bin"):
        read_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        read_checkpoint(tmp_path / "none")
    write_index(tmp_path, {})
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="not an index"):
        read_checkpoint(tmp_path)
