"""The doctor's findings as a rich table."""

from collections.abc import Sequence

from dflash_jax.doctor import Finding

_STYLES = {"green": "green", "amber": "yellow", "red": "bold red"}


def build(findings: Sequence[Finding], *, title: str):
    """A rich Table with one row a finding: topic, level, reason, and what to do."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    table.add_column("topic", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for one in findings:
        said = Text(one.reason)
        if one.mend:
            said.append(f"\n→ {one.mend}", style=_STYLES[one.level])
        table.add_row(one.topic, Text(one.level, style=_STYLES[one.level]), said)
    return table


def show(findings: Sequence[Finding], *, title: str) -> None:
    """Print the table to stdout, as wide as the terminal."""
    from rich.console import Console

    Console().print(build(findings, title=title))
