"""How a run names what it compiled."""

import jax
import jax.numpy as jnp

from dflash_jax.run import _fingerprint


def compiled(source: str, name: str):
    """`f` of a source text, as a file of that name would give it."""
    scope: dict = {"jnp": jnp}
    exec(compile(source, name, "exec"), scope)
    return jax.jit(scope["f"]).lower(jnp.ones((3, 3), jnp.float32)).compile()


def test_executables_are_named_by_their_instructions_and_not_by_their_source():
    source = "def f(x):\n    return jnp.sin(x) @ x\n"
    same = [compiled(source, "one.py"), compiled("\n\n" + source, "elsewhere.py")]
    assert same[0].as_text() != same[1].as_text()
    names = [_fingerprint([executable]) for executable in same]
    assert names[0] == names[1]
    assert _fingerprint([compiled(source.replace("sin", "cos"), "one.py")]) != names[0]
