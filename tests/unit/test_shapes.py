"""`check_shape`: the letters of a signature against an array."""

import numpy as np
import pytest

from dflash_jax.shapes import check_shape

DIMS = {"B": 2, "H": 4, "D": 16, "M": 3, "E": 64}


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("B H D", (2, 4, 16)),
        ("T M*E", (5, 192)),
        ("T T", (7, 7)),
        ("2*B 3", (4, 3)),
        ("", ()),
    ],
)
def test_a_shape_that_fits_passes(spec, shape):
    check_shape("op: x", np.zeros(shape), spec, DIMS)


@pytest.mark.parametrize(
    ("spec", "shape", "wanted"),
    [
        ("B H D", (2, 4), r"\[2, 4\], wanted \[B=2, H=4, D=16\]"),
        ("B H D", (2, 5, 16), r"\[2, 5, 16\], wanted \[B=2, H=4, D=16\]"),
        ("T M*E", (5, 191), r"\[5, 191\], wanted \[T, M\*E=192\]"),
        ("T T", (7, 8), r"\[7, 8\], wanted \[T, T\]"),
    ],
)
def test_a_shape_that_does_not_fit_is_one_sentence_with_the_letters(spec, shape, wanted):
    with pytest.raises(ValueError, match=f"^op: x has shape {wanted}$"):
        check_shape("op: x", np.zeros(shape), spec, DIMS)
