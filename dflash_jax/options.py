"""`DecodeOptions`: static choices of a decode that are not shapes of carriers."""

from dataclasses import dataclass

from dflash_jax.sampling import SamplingMode


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What a compiled step bakes in beside its sizes.

    cycles: most steps a dispatch. impl: of the kernels. certify: hash the logits of each row.
    sampling: what can be asked beyond the best token; None compiles greedy decoding alone.
    """

    cycles: int = 8
    impl: str = "auto"
    certify: bool = False
    sampling: SamplingMode | None = None
