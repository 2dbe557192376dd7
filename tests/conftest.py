"""Options and fixtures that every test may use. Importing this file imports no jax."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before any test imports jax

import pytest
from hypothesis import settings

# Compiles make first examples slow and a random seed would make CI runs differ.
settings.register_profile("dflash", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("dflash")


def pytest_addoption(parser):
    parser.addoption(
        "--golden-dir",
        default=None,
        help="folder with golden cases and their manifest.json; without it tests/golden is skipped",
    )


def pytest_report_header(config):
    folder = golden_dir(config)
    return f"golden vectors: {folder if folder else 'none (--golden-dir not given)'}"


def golden_dir(config) -> Path | None:
    """The folder given with --golden-dir, checked to hold a manifest."""
    given = config.getoption("--golden-dir")
    if given is None:
        return None
    folder = Path(given).resolve()
    if not (folder / "manifest.json").is_file():
        raise pytest.UsageError(f"--golden-dir {given}: no manifest.json in it")
    return folder


# Linux lets a process map 65,530 regions; each compiled program of a CPU holds several, and XLA's
# compiler crashes when there are no more. A long file adds up to half of them.
MOST_MAPS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Drop compiled programs before a file's tests when the process has gathered many."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def compile_effort():
    """Compile with little optimisation on a CPU, which takes two thirds of the time.

    A file that is about what the optimiser may change, or that computes for longer than it
    compiles, has a fixture of this name.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", jax.config.jax_platforms == "cpu")


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that the last file is short and no process waits long."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs an NVIDIA GPU (run with JAX_PLATFORMS=cuda)")


def pytest_terminal_summary(terminalreporter, config):
    """Say how many golden cases ran, so that a run which skipped them all cannot look green."""
    if golden_dir(config) is None:
        return
    ran = [
        report.nodeid
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.nodeid.startswith("tests/golden/") and report.when == "call"
    ]
    terminalreporter.write_line(f"golden cases run: {len(set(ran))}")


@pytest.fixture
def strict_dtypes():
    """Raise on implicit dtype and rank promotion: for layers, kernels, drafters and the loop."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
