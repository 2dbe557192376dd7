"""dflash_jax: block-diffusion speculative decoding in JAX."""
