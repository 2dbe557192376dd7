"""Prompt lookup: guess that what followed the last tokens before will follow them again.

The rule, exactly: take the last `ngram` tokens of the text, the anchor included; find where the
same tokens start earlier (the most recent such place, which may overlap the suffix itself); propose
what came after it, at most `num_drafts` tokens. No such place, or a text that is too short: no
drafts. A continuation that reaches the end of the text stops there.
"""


def propose(tokens, num_drafts, ngram=3):
    """The drafts after `tokens`, a list of ids that ends with the anchor."""
    tokens = [int(token) for token in tokens]
    suffix = tokens[-ngram:]
    for start in range(len(tokens) - ngram - 1, -1, -1):
        if tokens[start : start + ngram] == suffix:
            return tokens[start + ngram : start + ngram + num_drafts]
    return []
