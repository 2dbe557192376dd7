"""`DecodeOptions`: static choices of a decode that are not shapes of carriers."""

from dataclasses import dataclass

from dflash_jax.sampling import SamplingMode


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What a compiled step bakes in beside its sizes.

    cycles: most steps a dispatch. impl: of the kernels. certify: hash the logits of each row.
    sampling: what can be asked beyond the best token; None compiles greedy decoding alone.
    markov_top_k: DSpark drafts among so many best base logits of a row, approximate in drafting
      and never in the text; 0: among all.
    """

    cycles: int = 8
    impl: str = "auto"
    certify: bool = False
    sampling: SamplingMode | None = None
    markov_top_k: int = 0
