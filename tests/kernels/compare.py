"""How kernel tests compare: floats relative to the oracle's scale, bits where bits must be."""

# Pallas' interpreter imports this when it first runs, and with it a setting that all caches of jax
# are keyed by: imported that late, it has every program of the process compiled a second time.
import jax.experimental.pallas.tpu  # noqa: F401
import numpy as np

# Largest error over the oracle's largest magnitude. f32: the rounding of sums of up to 1,300 terms.
# bf16: half an ulp of the result (2^-9) and the probabilities' own rounding before the PV product.
TOLERANCE = {"float32": 4e-6, "bfloat16": 2.0**-7}


def assert_close(got, want, dtype=None):
    """Compare with an oracle; `dtype` names the coarsest rounding on the way, by default got's."""
    got = np.asarray(got)
    dtype = np.dtype(dtype or got.dtype).name
    got, want = got.astype(np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    error, scale = np.abs(got - want).max(), np.abs(want).max()
    assert error <= TOLERANCE[dtype] * scale, f"error {error:.3g} on a scale of {scale:.3g}"


def bits(x):
    """Return the bit patterns of a float array, in which NaN equals itself and -0.0 is not 0.0."""
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_same_bits(got, want):
    np.testing.assert_array_equal(bits(got), bits(want))
