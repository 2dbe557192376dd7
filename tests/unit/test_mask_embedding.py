"""mask_embedding.pt: tensors are read, and a pickle with anything else in it runs nothing."""

import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.mask_embedding import read_mask_embedding, write_mask_embedding

DATA = Path(__file__).parents[1] / "data"


def test_what_torch_saved_is_read():
    """The file is torch 2.13's: {"embedding": a bf16 tensor [1, 5], "mask_token_id": 306}."""
    vector, mask_id = read_mask_embedding(DATA / "mask_embedding_torch.pt")
    assert mask_id == 306 and vector.dtype == ml_dtypes.bfloat16
    assert vector.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_we_write_comes_back(tmp_path, dtype):
    vector = np.linspace(-3, 3, 64).astype(dtype)
    write_mask_embedding(tmp_path / "mask_embedding.pt", vector, 248070)
    back = read_mask_embedding(tmp_path / "mask_embedding.pt")
    assert back.vector.dtype == dtype and np.array_equal(back.vector, vector)
    assert back.mask_id == 248070
    assert [p.name for p in tmp_path.iterdir()] == ["mask_embedding.pt"]


def archive(path, program, files=None, packed=False):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as out:
        out.writestr("m/data.pkl", program)
        for name, data in (files or {}).items():
            out.writestr(f"m/{name}", data)
    return path


def changed(tmp_path, *changes, files=None):
    """Our own file of four numbers, with bytes of its pickle replaced."""
    write_mask_embedding(tmp_path / "good.pt", np.arange(4, dtype=np.float32), 306)
    with zipfile.ZipFile(tmp_path / "good.pt") as source:
        kept = {n.removeprefix("good/"): source.read(n) for n in source.namelist()}
    program = kept.pop("data.pkl")
    for old, new in changes:
        assert old in program
        program = program.replace(old, new)
    return archive(tmp_path / "bad.pt", program, kept | (files or {}))


class Spy:
    """Its pickle creates a file when it runs."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(tmp_path, protocol):
    path = archive(tmp_path / "m.pt", pickle.dumps({"embedding": Spy(tmp_path / "x")}, protocol))
    with pytest.raises(ValueError, match="the pickle in it asks for .*, wanted float tensors"):
        read_mask_embedding(path)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("program", "asks"),
    [
        (b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", "os.system"),
        (b"\x80\x02ctorch\nDoubleStorage\n.", "torch.DoubleStorage"),
        (b"(ios\nsystem\n.", "opcode INST"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "opcode LONG_BINPUT"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "damaged"),
        (b"\x80\x02}X\xff\xff\xff\x7f.", "damaged"),
        (b"\x80\x02}", "damaged"),
        (b"", "damaged"),
        (b"\x80\x02}Q.", "damaged"),
    ],
)
def test_a_hostile_or_damaged_pickle_is_one_sentence(tmp_path, program, asks):
    with pytest.raises(ValueError, match=asks):
        read_mask_embedding(archive(tmp_path / "m.pt", program))


def test_a_file_that_is_no_zip_of_torchs_is_said(tmp_path):
    path = tmp_path / "m.pt"
    path.write_bytes(pickle.dumps([1.0]))
    with pytest.raises(ValueError, match="m.pt: not a zip that torch.save wrote"):
        read_mask_embedding(path)
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("readme", "nothing here")
    with pytest.raises(ValueError, match="0 pickles in it, wanted the one"):
        read_mask_embedding(path)
    with pytest.raises(ValueError, match="no tensor in it, nor a dict"):
        read_mask_embedding(archive(path, pickle.dumps({}, 2)))
    with pytest.raises(ValueError, match="is packed or has"):
        read_mask_embedding(archive(path, pickle.dumps({}, 2) * 9, packed=True))


def i32(value):
    return b"J" + value.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # [4] becomes [9] of stride 1; stride 0; a first dimension below 0
        ((i32(4) + b"\x85" + i32(1), i32(9) + b"\x85" + i32(1)), "leaves its storage of 4"),
        ((i32(4) + b"\x85" + i32(1), i32(4) + b"\x85" + i32(0)), "leaves its storage of 4"),
        ((i32(4) + b"\x85", b"J\xff\xff\xff\xff\x85"), "damaged"),
        ((i32(4) + b"\x85" + i32(1), i32(0) + b"\x85" + i32(1)), r"shape \[0\], wanted one row"),
        (
            (i32(4) + b"\x85" + i32(1) + b"\x85", i32(2) * 2 + b"\x86" + i32(2) + i32(1) + b"\x86"),
            r"shape \[2, 2\], wanted one row",
        ),
        ((b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007"), "no 'm/data/7' in it"),
        ((i32(306), i32(306)[:4] + b"\xff"), "mask_token_id is no token id"),
    ],
)
def test_a_tensor_that_is_not_one_row_of_its_storage_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_mask_embedding(changed(tmp_path, change))


def test_numbers_that_are_not_finite_or_big_endian_are_refused(tmp_path):
    infinite = np.array([0, np.inf, 0, 0], np.float32).tobytes()
    with pytest.raises(ValueError, match="numbers that are not finite"):
        read_mask_embedding(changed(tmp_path, files={"data/0": infinite}))
    with pytest.raises(ValueError, match="big-endian numbers"):
        read_mask_embedding(changed(tmp_path, files={"byteorder": "big"}))


def test_a_file_with_any_byte_changed_is_read_or_refused_in_a_sentence(tmp_path):
    whole = (DATA / "mask_embedding_torch.pt").read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "m.pt"
    refused = 0
    for at in rng.permutation(len(whole))[:400]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            read_mask_embedding(path)
        except ValueError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            refused += 1
    assert refused > 100
