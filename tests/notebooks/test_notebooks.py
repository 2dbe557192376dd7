"""Every notebook runs from top to bottom, uses the public surface alone, and carries no outputs."""

import ast
import os
from pathlib import Path

import pytest

from dflash_jax.download import DownloadError, default_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_CODE_CELLS, MAX_LINES = 15, 20
OURS = ("dflash_jax", "pallas_kernels")


def read(path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebooks'")
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_has_no_outputs(path):
    cells = code_cells(path)
    assert 0 < len(cells) <= MAX_CODE_CELLS
    for cell in cells:
        assert len(cell.source.splitlines()) <= MAX_LINES, cell.source
        assert not cell.outputs and cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_only_the_public_surface(path):
    source = "\n".join(line for cell in code_cells(path) for line in cell.source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            inside = [name.name for name in node.names if name.name.startswith(OURS)]
            assert set(inside) <= set(OURS), inside
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            assert node.module in OURS, node.module


def require_default_model(path):
    """Skip a notebook whose model cannot be had here, with the reason."""
    if any('"smollm2"' in cell.source for cell in code_cells(path)):
        try:
            default_model(progress=False)
        except DownloadError as error:
            pytest.skip(str(error))


# The kernel and its messaging libraries warn about themselves.
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'notebooks'")
    pytest.importorskip("ipykernel", reason="needs the extra 'notebooks'")
    require_default_model(path)
    client = nbclient.NotebookClient(
        read(path), timeout=600, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    )
    # The kernel is a process of its own: it must run the code that pytest runs.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    client.execute(env={**os.environ, "PYTHONPATH": paths})
