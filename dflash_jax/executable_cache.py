"""Compiled programs and XLA's tuning choices on disk, for the command line; no import turns it on.

A program compiled for a GPU holds what its autotuner chose by timing, so that two processes which
tune for themselves may round differently. Here the second process loads the first one's program and
compiles nothing. The choices are kept beside it, one file a fusion: a program that changed a little
then still gets the matrix products that it had.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from dflash_jax.download import cache_folder

# JAX's own name for XLA's table of choices. It is also JAX's default, stated so that it stays.
TUNING = "xla_gpu_per_fusion_autotune_cache_dir"
_PROGRAM = "*-cache"  # what JAX calls one compiled program
_LOOKED_THROUGH = ".looked-through"  # its time: programs written before it are whole
_OURS = (_PROGRAM, "*-atime", ".lockfile", _LOOKED_THROUGH)
_ZLIB = b"\x78"  # first byte of what JAX writes, unless a zstd library is installed


class Contents(NamedTuple):
    """What a cache folder holds."""

    folder: Path
    programs: int
    program_bytes: int
    choices: int
    choice_bytes: int


def folder() -> Path:
    """Where this package keeps compiled programs."""
    return cache_folder() / "executables"


def keep_executables() -> Path:
    """Let compiled programs outlive the process and return their folder; the user's own wins."""
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return Path(jax.config.jax_compilation_cache_dir)
    remove_torn(folder())
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    # By default a program that took less than a second is compiled anew in each process.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", TUNING)
    return folder()


def remove_torn(where: Path) -> list[str]:
    """Remove programs that were not written to their end; return their names.

    JAX writes a program in place, so a process that is killed, or a full disk, leaves a part of it.
    JAX then warns of it at each start, compiles anew, and keeps the part. Only what was written
    since the last look is read.
    """
    if not (where.is_dir() and os.access(where, os.W_OK)):  # nothing there can be removed
        return []
    now, stamp = time.time(), where / _LOOKED_THROUGH
    since = stamp.stat().st_mtime if stamp.exists() else 0.0
    since = since if since <= now else 0.0  # the clock was ahead then, so its time says nothing
    torn = []
    for path in where.glob(_PROGRAM):
        with contextlib.suppress(OSError):  # another process removed it, or it cannot be read
            if path.stat().st_mtime >= since and not _is_whole(path):
                path.unlink()
                torn.append(path.name)
    with contextlib.suppress(OSError):
        stamp.touch()
        os.utime(stamp, (now, now))
    return torn


def _is_whole(path: Path) -> bool:
    """Whether a compressed file has its end; of a kind that we cannot read it is taken for granted.

    One that another process is writing may look torn. It is compiled once more then, no worse.
    """
    packed = path.read_bytes()
    if not packed.startswith(_ZLIB):
        return bool(packed)
    reader = zlib.decompressobj()
    try:
        while packed and not reader.eof:
            reader.decompress(packed, 1 << 20)
            packed = reader.unconsumed_tail
    except zlib.error:
        return False
    return reader.eof


def contents(where: Path | None = None) -> Contents:
    """Count what is in a cache folder; one that does not exist is empty."""
    where = folder() if where is None else where
    programs = _sizes(where.glob(_PROGRAM))
    choices = _sizes((where / TUNING).rglob("*"))
    return Contents(where, len(programs), sum(programs), len(choices), sum(choices))


def clear(where: Path | None = None) -> Contents:
    """Remove what JAX and XLA wrote into a cache folder, nothing else; return what that was."""
    where = folder() if where is None else where
    before = contents(where)
    for pattern in _OURS:
        for path in where.glob(pattern):
            path.unlink(missing_ok=True)
    shutil.rmtree(where / TUNING, ignore_errors=True)
    return before


def report(*, clears: bool) -> None:
    """Print a cache's contents, cleared or not, and one JSON object as the last line."""
    found = clear() if clears else contents()
    done = "removed from" if clears else "in"
    print(f"{done} {found.folder}")
    print(f"compiled programs  {found.programs:>6} {found.program_bytes / 2**20:>10.1f} MiB")
    print(f"tuning choices     {found.choices:>6} {found.choice_bytes / 2**20:>10.1f} MiB")
    print(json.dumps({**found._asdict(), "folder": str(found.folder), "cleared": clears}))


def _sizes(paths) -> list[int]:
    """Bytes of each file; one that another process removes meanwhile does not count."""
    sizes = []
    for path in paths:
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return sizes
