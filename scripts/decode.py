"""Decode a prompt: the same door as the console command `dflash decode`.

Example:
    python scripts/decode.py "What is the capital of France?" --max-new-tokens 64
"""

import sys

from dflash_jax import cli

if __name__ == "__main__":
    sys.exit(cli.main(["decode", *sys.argv[1:]]))
