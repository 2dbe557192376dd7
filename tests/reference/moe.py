"""Mixture-of-experts feed-forward, one row and one expert at a time (spec/checkpoints.md §5)."""

import numpy as np

from tests.reference import layers


def is_sparse(weights, prefix):
    """Whether the checkpoint has a router at this layer."""
    return f"{prefix}.gate.weight" in weights


def feed_forward(x, weights, prefix, config):
    """x[T, E] through the experts that each row chose, and the shared expert where there is one.

    A row goes to the `num_experts_per_tok` experts of highest probability, equal ones by lowest
    number. Their probabilities are brought to a sum of one if `norm_topk_prob` says so; Qwen3.5's
    configs do not have the key, and its router always does.
    """
    probabilities = layers.softmax(layers.linear(x, weights, f"{prefix}.gate"))
    count = config["num_experts_per_tok"]
    out = np.zeros_like(x)
    for t, row in enumerate(probabilities):
        chosen = np.argsort(-row, kind="stable")[:count]
        shares = row[chosen]
        if config.get("norm_topk_prob", config["model_type"].startswith("qwen3_5")):
            shares = shares / shares.sum()
        for expert, share in zip(chosen, shares, strict=True):
            out[t] += share * layers.swiglu(x[t], weights, f"{prefix}.experts.{expert}")
    if f"{prefix}.shared_expert_gate.weight" in weights:
        gate = layers.linear(x, weights, f"{prefix}.shared_expert_gate")
        out = out + layers.swiglu(x, weights, f"{prefix}.shared_expert") / (1 + np.exp(-gate))
    return out
