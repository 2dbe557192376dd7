"""Sampling in f64, by sorting and running sums (spec/verify.md §2.2).

A q is what one draft was drawn from: an array [V], a pair (ids [C], probabilities [C]), or None for
a draft that was not drawn, a point mass.
"""

import numpy as np

GREEDY_BELOW = 1e-5


def penalised(logits, prompt, answer, *, repetition=1.0, presence=0.0, frequency=0.0, bias=()):
    """Logits [V] after bias and penalties.

    Args:
      prompt, answer: ids; repetition counts both, the other two the answer alone.
      bias: (id, value) pairs, added first.
    """
    x = np.array(logits, np.float64)
    for token, value in bias:
        x[token] += value
    counts = np.bincount(np.asarray(answer, int), minlength=len(x))
    seen = (counts > 0) | (np.bincount(np.asarray(prompt, int), minlength=len(x)) > 0)
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    return x - frequency * counts - presence * (counts > 0)


def one_hot(index, size):
    return (np.arange(size) == index).astype(np.float64)


def distribution(logits, temperature, *, top_k=None, top_p=None, min_p=None):
    """Probabilities [V]: temperature, top-k, softmax, top-p, min-p, each on what is left.

    Equal tokens are ordered by id. Below `GREEDY_BELOW` all of it is on the best token.
    """
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")
    if temperature < GREEDY_BELOW:
        return one_hot(order[0], len(logits))
    p = np.exp((logits - logits[order[0]]) / temperature)
    if top_k is not None:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p is not None and top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    if min_p is not None:
        p[p < min_p * p.max()] = 0
    return p / p.sum()


def draw(weights, u):
    """First index whose running sum of `weights`[V] exceeds u in [0, 1) of the whole."""
    sums = np.cumsum(weights)
    return int(np.argmax(sums > u * sums[-1]))


def probability(q, token):
    """q(token)."""
    if q is None:
        return 1.0
    if isinstance(q, tuple):
        return float(q[1][q[0] == token].sum())
    return float(q[token])


def residual(p, q, draft):
    """What replaces a rejected draft: max(p - q, 0) normalised, p itself if that is nothing."""
    rest = np.array(p, np.float64)
    if q is None:
        rest[draft] = 0
    elif isinstance(q, tuple):
        np.subtract.at(rest, q[0], q[1])
    else:
        rest -= q
    rest = np.maximum(rest, 0)
    rest = rest if rest.sum() > 0 else np.asarray(p, np.float64)
    return rest / rest.sum()


def accept(p, qs, drafts, uniforms):
    """Accepted drafts, and the distribution [V] of what stands behind them.

    Args:
      p: [n + 1, V] the target behind the anchor and each draft.
      qs: a q a draft. uniforms: one a draft.
    """
    for row, (q, draft, u) in enumerate(zip(qs, drafts, uniforms, strict=True)):
        if not u * probability(q, draft) < p[row][draft]:
            return row, residual(p[row], q, draft)
    return len(drafts), np.asarray(p[len(drafts)], np.float64)


def generate(target, prompt, max_new_tokens, *, propose, num_drafts, tap_ids, uniforms, process):
    """Decode by sampling, the uniforms taken one after another as the z-lab loop does: the first
    token, then for each block its drafts, its accept tests, and what stands behind.

    Args:
      target: ids[T] -> TargetOutput.
      propose: (tokens, features, uniforms [n]) -> drafts and a q each.
      num_drafts: (new tokens still wanted) -> drafts of the next block.
      process: logits[V] -> distribution[V].
    Returns:
      prompt and new tokens, and how many tokens each block gave.
    """
    uniforms = iter(uniforms)
    tokens = [int(token) for token in prompt]
    end = len(tokens) + max_new_tokens
    tokens.append(draw(process(target(tokens).logits[-1]), next(uniforms)))
    produced = []
    while len(tokens) < end:
        count = num_drafts(end - len(tokens))
        features = target(tokens[:-1]).features(tap_ids)
        drafts, qs = propose(tokens, features, [next(uniforms) for _ in range(count)])
        p = [process(row) for row in target(tokens + drafts).logits[len(tokens) - 1 :]]
        accepted, rest = accept(p, qs, drafts, [next(uniforms) for _ in range(count)])
        tokens += [*drafts[:accepted], draw(rest, next(uniforms))]
        produced.append(accepted + 1)
    return tokens[:end], produced
