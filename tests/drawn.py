"""Drafter weights drawn by NumPy: `initial_tensors` has many shapes, each slow to compile."""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig
from dflash_jax.params import TargetParams
from dflash_jax.train.initial import initial_tensors


def drawn_tensors(
    config: DraftConfig, target: TargetParams, *, seed: int = 1, noise: float = 0.0
) -> dict[str, jax.Array]:
    """Tensors by checkpoint name, f32: random matrices, gains of one, identity convolutions.

    Args:
      noise: size of what is added to all, so that nothing is hidden behind an identity.
    """
    shapes = jax.eval_shape(lambda key: initial_tensors(config, target, key), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = np.ones(shape)
        if name.endswith("base_kernel"):
            x[:, 1:] = 0.0
        elif len(shape) == 2:
            x = rng.normal(size=shape) * shape[1] ** -0.5
        return x + noise * rng.normal(size=shape)

    return {name: jnp.asarray(draw(name, x.shape), jnp.float32) for name, x in shapes.items()}
