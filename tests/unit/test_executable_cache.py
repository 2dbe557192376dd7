"""The cache of compiled programs: what is counted, what is cleared, and whose folder it is."""

import json
import os
import subprocess
import sys
import zlib

import pytest

from dflash_jax import cli, executable_cache


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A cache folder with two programs, one tuning choice, and a file that is not ours."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    folder = tmp_path / "executables"
    choices = folder / executable_cache.TUNING
    choices.mkdir(parents=True)
    (folder / "jit_decode-1-cache").write_bytes(b"x" * 100)
    (folder / "jit_prefill-2-cache").write_bytes(b"x" * 50)
    (folder / "jit_decode-1-atime").write_bytes(b"x" * 8)
    (choices / "fusion.textproto").write_bytes(b"x" * 7)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "model.gguf").write_text("model")
    return folder


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_cache_counts_programs_and_tuning_choices(kept, capsys):
    assert cli.main(["cache"]) == 0
    assert last_line(capsys) == {
        "folder": str(kept),
        "programs": 2,
        "program_bytes": 150,
        "choices": 1,
        "choice_bytes": 7,
        "cleared": False,
    }
    assert len(list(kept.iterdir())) == 5


def test_clearing_removes_what_jax_wrote_and_nothing_else(kept, capsys):
    assert cli.main(["cache", "--clear"]) == 0
    assert last_line(capsys)["programs"] == 2
    assert [path.name for path in kept.iterdir()] == ["notes.txt"]
    assert (kept.parent / "model.gguf").exists()
    assert cli.main(["cache"]) == 0
    assert last_line(capsys)["program_bytes"] == 0


_TEARS = (
    "import sys, warnings, jax\n"
    "from dflash_jax import executable_cache\n"
    "where = executable_cache.keep_executables()\n"
    "warnings.simplefilter('error')\n"
    "jax.jit(lambda x: x + 1)(1.0)\n"
    "print(*sorted(p.stat().st_size for p in where.glob('jit__lambda*-cache')))\n"
)


def test_a_program_that_was_not_written_to_its_end_is_compiled_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))

    def sizes():
        done = subprocess.run([sys.executable, "-c", _TEARS], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr  # JAX's warning of it would be an error
        return done.stdout

    whole = sizes()
    (path,) = (tmp_path / "executables").glob("jit__lambda*-cache")
    packed = path.read_bytes()
    for part in (packed[:-1], b""):
        path.write_bytes(part)
        assert sizes() == whole and path.read_bytes() != part


def test_only_what_was_written_since_the_last_look_is_read(tmp_path, monkeypatch):
    whole = tmp_path / "jit_a-1-cache"
    whole.write_bytes(zlib.compress(b"x" * 3_000_000))
    (tmp_path / "jit_b-2-cache").write_bytes(zlib.compress(b"x" * 99)[:-2])
    (tmp_path / "jit_c-3-cache").write_bytes(b"(zstd, which we do not read")
    assert executable_cache.remove_torn(tmp_path) == ["jit_b-2-cache"]
    monkeypatch.setattr(executable_cache, "_is_whole", lambda path: False)
    os.utime(whole, (1.0, 1.0))
    os.utime(tmp_path / "jit_c-3-cache", (1.0, 1.0))
    assert executable_cache.remove_torn(tmp_path) == [] and whole.exists()
    executable_cache.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert executable_cache.remove_torn(tmp_path / "none") == []


def test_a_last_look_in_the_future_does_not_count(tmp_path):
    assert executable_cache.remove_torn(tmp_path) == []
    (stamp,) = tmp_path.iterdir()
    os.utime(stamp, (2**32, 2**32))
    (tmp_path / "jit_a-1-cache").write_bytes(b"")
    assert executable_cache.remove_torn(tmp_path) == ["jit_a-1-cache"]


def test_an_entry_that_cannot_be_read_does_not_end_the_look(tmp_path):
    (tmp_path / "jit_a-1-cache").symlink_to(tmp_path / "gone")
    for name in ("jit_b-2-cache", "jit_c-3-cache"):
        (tmp_path / name).write_bytes(b"")
    assert sorted(executable_cache.remove_torn(tmp_path)) == ["jit_b-2-cache", "jit_c-3-cache"]
    assert (tmp_path / executable_cache._LOOKED_THROUGH).exists()


def test_a_folder_that_does_not_exist_is_empty(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "none"))
    assert cli.main(["cache", "--clear"]) == 0
    assert last_line(capsys)["programs"] == 0
    assert not (tmp_path / "none").exists()


_SAYS = (
    "import os, sys, jax\n"
    "from dflash_jax import executable_cache\n"
    "before = jax.config.jax_compilation_cache_dir\n"
    "print(before, executable_cache.keep_executables(), jax.config.jax_compilation_cache_dir)\n"
    "print(jax.config.jax_persistent_cache_min_compile_time_secs)\n"
    "from jax._src import compiler\n"
    "options = compiler.get_compile_options(num_replicas=1, num_partitions=1)\n"
    "build = options.executable_build_options\n"
    "print(build.debug_options.xla_gpu_per_fusion_autotune_cache_dir)\n"
)


@pytest.mark.parametrize("given", [None, "theirs"])
def test_the_users_own_folder_wins_and_importing_sets_nothing(tmp_path, monkeypatch, given):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    ours = str(tmp_path / "executables")
    wanted = ours if given is None else str(tmp_path / given)
    if given is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", wanted)
    done = subprocess.run([sys.executable, "-c", _SAYS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folders, seconds, choices = done.stdout.splitlines()
    assert folders == f"{None if given is None else wanted} {wanted} {wanted}"
    assert float(seconds) == (0.0 if given is None else 1.0)
    # What a GPU's compiler gets: its choices go beside the programs.
    assert choices == f"{wanted}/{executable_cache.TUNING}"
