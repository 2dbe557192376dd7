"""Plots of a `Stats`. matplotlib is an optional dependency, imported when a figure is drawn."""

import io

import numpy as np

from dflash_jax.stats import Stats

_CUMULATIVE, _CONDITIONAL, _BAR = "#1f5fa8", "#c8641b", "#8fb3d9"
_LARGEST_DOT = 90  # points squared, for a position that every cycle reached
_SMALLEST_DOT = 6


def acceptance(stats: Stats):
    """Acceptance by draft position beside the histogram of accepted drafts: a matplotlib Figure."""
    figure = _figure_class()(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _positions(left, stats)
    _histogram(right, stats)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure


def _positions(axes, stats: Stats) -> None:
    """Both rates by position. A conditional rate of few cycles is a small dot: it says little."""
    conditional, cumulative = stats.acceptance_by_position()
    position = np.arange(1, stats.num_drafts + 1)
    axes.plot(position, cumulative, "o-", color=_CUMULATIVE, label="cumulative: 1..j accepted")
    before = stats.histogram()[::-1].cumsum()[::-1][: stats.num_drafts]  # accepted 1..j-1
    dots = np.maximum(_LARGEST_DOT * before / max(stats.num_cycles, 1), _SMALLEST_DOT)
    axes.plot(position, conditional, "--", color=_CONDITIONAL, linewidth=1)
    label = "conditional: j, given 1..j-1 (dot: how many cycles)"
    axes.scatter(position, conditional, s=dots, color=_CONDITIONAL, label=label)
    axes.set(xlabel="draft position j", ylabel="share of cycles", ylim=(0, 1.05), xticks=position)
    axes.set_title(stats.title(), fontsize="medium")
    if stats.num_drafts:
        # Below the axes: rates may be anywhere in them.
        axes.figure.legend(loc="outside lower left", ncols=2, fontsize="small", frameon=False)


def _histogram(axes, stats: Stats) -> None:
    counts = stats.histogram()
    bars = axes.bar(np.arange(counts.size), counts, color=_BAR)
    axes.bar_label(bars, fontsize="small")
    axes.set(xlabel="drafts accepted in a cycle", ylabel="cycles", xticks=np.arange(counts.size))
    axes.margins(y=0.12)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"tau {stats.tau:.2f} tokens a cycle, bonus included", fontsize="medium")


def _figure_class():
    # Not pyplot: its figures are global state and would be drawn twice in a notebook.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Stats.plot: matplotlib is not installed; it is in the extra 'notebooks'"
        ) from error

    class Drawn(Figure):
        """A Figure that a notebook shows as a picture even where nobody imported pyplot."""

        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    return Drawn
