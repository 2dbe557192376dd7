"""How a run names what it compiled."""

import jax
import jax.numpy as jnp

from dflash_jax.run import _fingerprint


def compiled(scope: str, function):
    """`function(x) @ x` whose instructions say that they come from `scope`."""

    def f(x):
        with jax.named_scope(scope):
            return function(x) @ x

    return jax.jit(f).lower(jnp.ones((3, 3), jnp.float32)).compile()


def test_executables_are_named_by_their_instructions_and_not_by_their_source():
    same = [compiled("here", jnp.sin), compiled("elsewhere", jnp.sin)]
    assert same[0].as_text() != same[1].as_text()
    names = [_fingerprint([executable]) for executable in same]
    assert names[0] == names[1]
    assert _fingerprint([compiled("here", jnp.cos)]) != names[0]
