"""A `Stats` as a rich table, on a terminal or as HTML for a notebook."""

import io

from dflash_jax.stats import Stats


def build(stats: Stats):
    """A rich Table with one row a figure and its definition beside it."""
    from rich.table import Table

    table = Table(
        title=stats.title(),
        caption=stats.warning,
        caption_style="bold yellow",
    )
    table.add_column("figure", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("what it counts", style="dim")
    for row in stats.rows():
        table.add_row(*row)
    return table


def html(stats: Stats) -> str:
    """The table as an HTML fragment, for `_repr_html_`."""
    from rich.console import Console

    console = Console(record=True, width=110, file=io.StringIO())
    console.print(build(stats))
    # A notebook's own line height would tear the frame apart.
    style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace"
    return console.export_html(
        inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>'
    )
