"""What a person sees on stderr while something slow runs: a bar on a terminal, lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield `update(done, total)`; without a terminal the title is printed once."""
    if not sys.stderr.isatty():
        print(title, file=sys.stderr)
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


class Phases:
    """Says which slow phase runs: a spinner on a terminal until `stop`, lines elsewhere."""

    def __init__(self) -> None:
        self._status = None

    def __call__(self, words: str) -> None:
        if not sys.stderr.isatty():
            print(words, file=sys.stderr)
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True).status(words)
            self._status.start()
        self._status.update(words)

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
