"""`DecodeOptions`: static choices of a decode that are not shapes of carriers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_jax.fixed import Fixed
from dflash_jax.sampling import SamplingMode
from dflash_jax.shapes import check_integers
from dflash_jax.words import counted


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What a compiled step bakes in beside its sizes.

    cycles: most steps a dispatch. impl: of the kernels. certify: hash the logits of each row.
    sampling: what can be asked beyond the best token; None compiles greedy decoding alone.
    markov_top_k: DSpark drafts among so many best base logits of a row, approximate in drafting
      and never in the text; 0: among all.
    verify_widths: rows a sequence, below `Fixed.verify_rows` and ascending, that the target is
      compiled for as well; a cycle takes the narrowest that holds what every sequence verifies.
      This is outside the bitwise law: the same rows may round differently in another width, so a
      near tie of the target may fall the other way. The law of the answers is the same.
    """

    cycles: int = 8
    impl: str = "auto"
    certify: bool = False
    sampling: SamplingMode | None = None
    markov_top_k: int = 0
    verify_widths: Sequence[int] = ()

    def __post_init__(self) -> None:
        widths = self.verify_widths
        if isinstance(widths, str) or not isinstance(widths, Sequence | np.ndarray):
            raise TypeError(f"verify_widths are {widths!r}, wanted a list of integers")
        for width in widths:
            check_integers("verify_widths", width=width)
        widths = tuple(map(int, widths))  # hashable
        object.__setattr__(self, "verify_widths", widths)
        if widths and self.certify:
            raise ValueError(
                f"verify_widths are {list(widths)} and certify is True, wanted one of them: bits "
                "are certified in one width"
            )

    def widths(self, fixed: Fixed) -> tuple[int, ...]:
        """Rows a sequence of each compiled verification, ascending; the last one is the full width.

        Raises:
          ValueError: `verify_widths` that are not ascending, or not below the full width.
        """
        given, full = self.verify_widths, fixed.verify_rows
        if given and full == 1:
            raise ValueError(
                f"verify_widths are {list(given)}, but a step without drafts has one row, wanted "
                "none"
            )
        if any(not 1 <= width < full for width in given) or list(given) != sorted(set(given)):
            raise ValueError(
                f"verify_widths are {list(given)}, wanted ascending numbers from 1 to {full - 1}: "
                f"a full step of {counted(fixed.num_drafts, 'draft')} has {full} rows"
            )
        return (*given, full)
