"""DFlash2: DFlash with a convolution round each sublayer and a selector (spec/drafters.md §4).

The convolution is causal inside the block and its kernels depend on the row. The selector replaces
the independent argmax of each row by a walk in which a draft depends on the one before it.
"""

from typing import NamedTuple

import numpy as np

from tests.reference import layers
from tests.reference.dflash import DFlash
from tests.reference.sampling import draw

PREPARE, FINISH = 0, 1  # the sides of a convolution: before its sublayer and after it


def dynamic_kernels(x, projection, taps, groups):
    """Sublayer input x[R, E] -> [R, 2, taps, groups]; side is slowest, group fastest."""
    return (x @ projection.T).reshape(len(x), 2, taps, groups)


def causal_conv(x, dynamic, base):
    """y[i, c] = sum over taps t of (base[t, c] + dynamic[i, t, c // group size]) * x[i - t, c].

    Args:
      x: [R, E] rows of one block; a row before row 0 counts as zero.
      dynamic: [R, taps, groups].
      base: [taps, E].
    """
    rows, width = x.shape
    taps, groups = dynamic.shape[1:]
    y = np.zeros_like(x)
    for i in range(rows):
        for t in range(min(taps, i + 1)):
            kernel = base[t] + np.repeat(dynamic[i, t], width // groups)
            y[i] += kernel * x[i - t]
    return y


def grouped_dynamic_conv(x, base, projection, group_size):
    """Convolve a sublayer's input; return it with the function that convolves the output.

    Both kernels come from the input x[R, E], before any convolution. `base` is [2, taps, E].
    """
    dynamic = dynamic_kernels(x, projection, base.shape[1], x.shape[1] // group_size)
    prepared = causal_conv(x, dynamic[:, PREPARE], base[PREPARE])
    return prepared, lambda z: causal_conv(z, dynamic[:, FINISH], base[FINISH])


def top_candidates(logits, count):
    """The `count` best ids of logits[V], best first; equal logits go to the lowest id."""
    ids = np.argsort(-logits, kind="stable")[:count]
    return ids, logits[ids]


class Walk(NamedTuple):
    """What the selector saw on its way: one row a draft."""

    drafts: list  # ids
    candidates: np.ndarray  # [R-1, C] ids, best logit first
    unary: np.ndarray  # [R-1, C] their logits
    scores: np.ndarray  # [R-1, C] given the draft chosen in the row before


def edge_scores(unary, candidates, predecessor, hidden_row, selector):
    """unary[c] + sum_r A[predecessor, r] * (Wh h)[r] * B[candidate c, r]."""
    projected = selector["hidden_projection"] @ hidden_row
    left = selector["predecessor_codebook"][predecessor] * projected
    return unary + selector["successor_codebook"][candidates] @ left


def walk(
    hidden, logits, anchor, selector, count, *, temperature=0.0, uniforms=(), find=top_candidates
):
    """Choose drafts row by row, each given the one before it; row 0's predecessor is the anchor.

    At a temperature above 0 each is drawn from softmax(scores / temperature) by `uniforms`, one a
    row, over the candidates in the order in which `find` gives them.
    """
    drafts, candidates, unaries, scores = [], [], [], []
    predecessor = int(anchor)
    for hidden_row, logits_row in zip(hidden, logits, strict=True):
        ids, unary = find(logits_row, count)
        row = edge_scores(unary, ids, predecessor, hidden_row, selector)
        if temperature > 0:
            u = uniforms[len(drafts)]
            predecessor = int(ids[draw(layers.softmax(row / temperature), u)])
        else:
            predecessor = int(ids[row == row.max()].min())  # equal scores: the lowest token id
        drafts.append(predecessor)
        candidates.append(ids)
        unaries.append(unary)
        scores.append(row)
    return Walk(drafts, np.array(candidates), np.array(unaries), np.array(scores))


class DFlash2(DFlash):
    """A DFlash2 checkpoint; context rows are never convolved, so `fuse` is v1's."""

    def _fact(self, key):
        nested = self.config.raw.get("dflash_config") or {}
        return nested.get(key, self.config.raw.get(key))

    @property
    def selector(self):
        """The three selector arrays under their short names."""
        prefix = "candidate_selector."
        return {
            "hidden_projection": self.weights[f"{prefix}hidden_projection.weight"],
            "predecessor_codebook": self._codebook(f"{prefix}predecessor_codebook"),
            "successor_codebook": self._codebook(f"{prefix}successor_codebook"),
        }

    def _codebook(self, name):  # published files leave `.weight` out, some ports add it
        return self.weights[name if name in self.weights else f"{name}.weight"]

    def _conv(self, i, sublayer):
        prefix = f"layers.{i}.{sublayer}_conv"
        base = self.weights[f"{prefix}.base_kernel"]
        projection = self.weights[f"{prefix}.kernel_projection.weight"]
        return lambda x: grouped_dynamic_conv(x, base, projection, self._fact("conv_group_size"))

    def walk(self, hidden, anchor, **how):
        """The selector's walk over final hidden [R-1, E] of the mask rows; `how` as for `walk`."""
        count = self._fact("selector_top_k")
        return walk(hidden, self.logits(hidden), anchor, self.selector, count, **how)

    def sample(self, tokens, features, uniforms, temperature, **how):
        """Drafts drawn on the walk, and the candidates with the probabilities of each draw."""
        hidden = self._draft_hidden(tokens, features, len(uniforms))
        how |= {"temperature": temperature, "uniforms": uniforms}
        found = self.walk(hidden, tokens[-1], **how)
        qs = [layers.softmax(row / temperature) for row in found.scores]
        return found.drafts, list(zip(found.candidates, qs, strict=True))

    def choose(self, hidden, anchor):
        """The drafts of the walk."""
        return self.walk(hidden, anchor).drafts


def load_drafter(folder, target, dtype=np.float64):
    """Read a drafter's folder for a DenseTarget: DFlash2 where the file has a selector."""
    drafter = DFlash.load(folder, target.embedding, target.head, dtype)
    if "candidate_selector.hidden_projection.weight" not in drafter.weights:
        return drafter
    return DFlash2(drafter.config.raw, drafter.weights, target.embedding, target.head, dtype)
