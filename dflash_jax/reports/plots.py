"""Plots of a `Stats`. matplotlib is an optional dependency, imported when a figure is drawn."""

import numpy as np

from dflash_jax.stats import Stats


def acceptance(stats: Stats):
    """Acceptance by draft position beside the histogram of accepted drafts: a matplotlib Figure."""
    figure_class = _figure_class()
    conditional, cumulative = stats.acceptance_by_position()
    position = np.arange(1, stats.num_drafts + 1)
    figure = figure_class(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(position, cumulative, "o-", label="cumulative (1..j accepted)")
    left.plot(position, conditional, "s--", label="conditional (j given 1..j-1)")
    left.set(xlabel="draft position j", ylabel="share of cycles", ylim=(0, 1.02), xticks=position)
    left.set_title(f"{stats.drafter}: acceptance by position")
    if stats.num_drafts:
        left.legend(fontsize="small")
    right.bar(np.arange(stats.num_drafts + 1), stats.histogram())
    right.set(xlabel="drafts accepted in a cycle", ylabel="cycles", xticks=[0, *position])
    right.set_title(f"tau {stats.tau:.2f} tokens a cycle, bonus included")
    return figure


def _figure_class():
    # Not pyplot: its figures are global state and would be drawn twice in a notebook.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Stats.plot: matplotlib is not installed; pip install 'dflash-jax[notebooks]'"
        ) from error
    return Figure
