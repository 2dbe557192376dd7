"""DSpark: DFlash's backbone in the next-token convention, a Markov chain over its rows, and a
confidence a draft (spec/drafters.md §5).

`block_size` rows [anchor, mask, ...] give as many drafts: row j, the anchor's included, says what
stands at position P + j + 1. A row's logits are corrected by a bias that depends on the draft
before it, so the rows are decided one after another. DeepSpec's DFlash is the same with rank 0.
"""

from typing import NamedTuple

import numpy as np

from tests.reference import layers
from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.dflash import DFlash
from tests.reference.sampling import draw


def sigmoid(x):
    """1 / (1 + exp(-x)); NaN stays NaN."""
    return 1 / (1 + np.exp(-x))


def markov_step(head, previous, hidden_row, state):
    """Bias of one row by the token before it: (bias [V], latent W1[previous] [r], next state [r]).

    Args:
      head: tensors without their `markov_head.` prefix; which are there tells the type. A gated
        head has `gate_proj`, a recurrent one `joint_proj`, a vanilla one neither.
      hidden_row: [E] after the final norm.
      state: [r] of a recurrent head, zeros in row 0; others hand it on.
    """
    latent = head["markov_w1.weight"][previous]
    if "gate_proj.weight" in head:
        gate = layers.linear(np.concatenate([hidden_row, latent]), head, "gate_proj")
        code = sigmoid(gate) * latent
    elif "joint_proj.weight" in head:
        joint = layers.linear(np.concatenate([state, latent, hidden_row]), head, "joint_proj")
        gate, candidate, out = np.split(joint, 3)
        code = np.tanh(out)  # of the state before this row
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
    else:
        code = latent
    return head["markov_w2.weight"] @ code, latent, state


class Chain(NamedTuple):
    """A block decided row by row."""

    drafts: list  # [R] ids
    bias: np.ndarray  # [R, V]; zeros without a Markov head
    logits: np.ndarray  # [R, V] base logits plus bias, before temperature
    latents: np.ndarray  # [R, r] of each row's predecessor


def chain(base_logits, hidden, anchor, head, *, temperature=0.0, uniforms=(), forced=None):
    """Decide the rows of a block; the anchor comes before row 0.

    Args:
      base_logits, hidden: [R, V] and [R, E] of the rows.
      head: as for `markov_step`, None for rank 0.
      temperature: 0 takes the best token, above it is drawn from softmax(logits / temperature) by
        `uniforms`, one a row.
      forced: predecessors [R] to use in the place of what was drafted.
    """
    rank = 0 if head is None else head["markov_w1.weight"].shape[1]
    drafts, biases, corrected, latents = [], [], [], []
    previous, state = int(anchor), np.zeros(rank, base_logits.dtype)
    for j, (logits, hidden_row) in enumerate(zip(base_logits, hidden, strict=True)):
        previous = previous if forced is None else int(forced[j])
        bias, latent = np.zeros_like(logits), np.zeros(0)
        if head is not None:
            bias, latent, state = markov_step(head, previous, hidden_row, state)
        logits = logits + bias
        if temperature > 0:
            previous = draw(layers.softmax(logits / temperature), uniforms[j])
        else:
            previous = int(layers.argmax_lowest(logits))
        for kept, x in (drafts, previous), (biases, bias), (corrected, logits), (latents, latent):
            kept.append(x)
    return Chain(drafts, np.array(biases), np.array(corrected), np.array(latents))


def confident_prefix(confidence_logits, threshold):
    """Drafts before the first whose confidence is below `threshold`, or is not a finite number.

    A threshold of 0 or less keeps all that are.
    """
    for j, logit in enumerate(confidence_logits):
        if not np.isfinite(logit) or sigmoid(logit) < threshold:
            return j
    return len(confidence_logits)


def survival(confidence_logits, temperatures):
    """Chance that draft j and all before it are accepted: cumprod sigmoid(logit / temperature)."""
    scaled = sigmoid(np.asarray(confidence_logits, float) / temperatures)
    return np.cumprod(np.where(np.isfinite(confidence_logits), scaled, 0.0), axis=-1)


def schedule(survivals, steps_per_second, limits=None):
    """Drafts to verify a sequence (paper, Algorithm 1 with its early stop).

    Rows are admitted by survival, highest first, ties to the lower sequence and row. Every
    sequence verifies its anchor; a row is admitted while it raises
    (expected tokens) * steps_per_second[rows], and the first that does not ends it.

    Args:
      survivals: [B, R] from `survival`, not increasing along a row.
      steps_per_second: [1 + B * (R + 1)] by rows verified; entry 0 is unused.
      limits: [B] drafts there may be, by default R; a sequence with a negative one takes no part.
    """
    batch, rows = survivals.shape
    limits = np.full(batch, rows) if limits is None else np.asarray(limits)
    counts = np.zeros(batch, int)
    total = int((limits >= 0).sum())  # an anchor each
    tokens = float(total)
    best = tokens * steps_per_second[total]
    order = sorted((-survivals[b, j], b, j) for b in range(batch) for j in range(limits[b]))
    for negative, b, _ in order:
        total, tokens = total + 1, tokens - negative
        rate = tokens * steps_per_second[total]
        if rate <= best:
            break
        best, counts[b] = rate, counts[b] + 1
    return counts


class DSpark(DFlash):
    """A DSpark checkpoint; its own embedding and head, where it has them, win."""

    @classmethod
    def load(cls, folder, embedding, head, dtype=np.float64):
        """Read a drafter's folder."""
        tensors = read_tensors(folder)
        embedding = tensors.pop("embed_tokens.weight", embedding)
        head = tensors.pop("lm_head.weight", head)
        return cls(read_config(folder), tensors, embedding, head, dtype)

    @property
    def markov(self):
        """Tensors of the Markov head under their short names, None for rank 0."""
        prefix = "markov_head."
        own = {n.removeprefix(prefix): x for n, x in self.weights.items() if n.startswith(prefix)}
        return own or None

    def chain(self, hidden, anchor, **how):
        """Decide the rows of final hidden [R, E]; `how` as for the function `chain`."""
        return chain(self.logits(hidden), hidden, anchor, self.markov, **how)

    def confidence_logits(self, hidden, latents):
        """[R] from the hidden rows and, where the head is as wide, their predecessors' latents."""
        weight = self.weights.get("confidence_head.proj.weight")
        if weight is None:
            return None
        with_markov = weight.shape[1] > hidden.shape[1]
        read = np.concatenate([hidden, latents], axis=1) if with_markov else hidden
        return layers.linear(read, self.weights, "confidence_head.proj")[:, 0]

    def propose(self, tokens, features, num_drafts, threshold=0.0):
        """At most `num_drafts` after `tokens`, those before the first that is not confident."""
        _, context = self.fuse(features[: len(tokens) - 1])
        hidden = self.forward(self.block_ids(tokens[-1], num_drafts), context)
        decided = self.chain(hidden, tokens[-1])
        confidence = self.confidence_logits(hidden, decided.latents)
        keep = num_drafts if confidence is None else confident_prefix(confidence, threshold)
        return decided.drafts[:keep]

    def sample(self, tokens, features, uniforms, temperature):
        """Drafts drawn along the chain, and the distribution [V] of each draw."""
        _, context = self.fuse(features[: len(tokens) - 1])
        hidden = self.forward(self.block_ids(tokens[-1], len(uniforms)), context)
        decided = self.chain(hidden, tokens[-1], temperature=temperature, uniforms=uniforms)
        return decided.drafts, [layers.softmax(row / temperature) for row in decided.logits]

    def choose(self, hidden, anchor):
        """Greedy drafts of all rows."""
        return self.chain(hidden, anchor).drafts
