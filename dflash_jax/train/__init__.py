"""Train a drafter on text that the target writes itself; needs the extra `train` (optax).

`generate` writes conversations, `dense` runs target and drafter over whole sequences, `losses`
scores the block rows, `loop` fits, `evaluate` measures acceptance, `export` writes the checkpoint.
`scripts/train_drafter.py` puts them together.
"""
