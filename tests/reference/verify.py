"""Greedy verification (spec/verify.md §2.1, §2.3)."""

from typing import NamedTuple


class Acceptance(NamedTuple):
    """One verify step's verdict, before stop tokens and budgets."""

    num_accepted: int
    committed: list  # accepted drafts, then the target's own token


def accept_greedy(drafts, target_argmax):
    """Accept drafts while they equal what the target says one row earlier.

    Args:
      drafts: ids d_1..d_n.
      target_argmax: ids of rows 0..n; row j says what follows d_j, row 0 what follows the anchor.
    """
    num_accepted = 0
    for draft, wanted in zip(drafts, target_argmax, strict=False):
        if draft != wanted:
            break
        num_accepted += 1
    bonus = target_argmax[num_accepted]
    return Acceptance(num_accepted, [*drafts[:num_accepted], bonus])


def clip(committed, remaining, stop_ids):
    """Cut at the budget, then after the first stop id, wherever in the block it stands."""
    kept = []
    for token in committed[:remaining]:
        kept.append(token)
        if token in stop_ids:
            break
    return kept
