"""The table of known faults names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")


def test_every_test_that_the_table_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TABLE)
    assert len(named) > 40
    for path, function in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not function or function in functions, f"{path} has no {function}"


def test_every_fault_is_in_the_table_once():
    ids = [
        fault
        for line in TABLE.splitlines()
        if (cells := line.split("|"))[1:]
        for fault in re.findall(r"\b[A-D]\d\d\b", cells[1])
    ]
    assert len(ids) == len(set(ids)) == 51
