"""Fixtures of the kernel tests."""

import pytest


@pytest.fixture
def little_optimisation():
    """Interpreted kernels are many small loops, which take the compiler longer than they run."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
