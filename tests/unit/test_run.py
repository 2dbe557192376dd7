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


class Text:
    """An executable of which only the text is known."""

    def __init__(self, text):
        self.as_text = lambda: text


def test_the_numbers_of_names_are_not_part_of_an_executable_and_its_wiring_is():
    text = "%a.7 = f32[] constant(0.25)\n%b.1 = f32[] cosine(%a.7)\n%b.2 = f32[] add(%b.1, %a.7)"
    name = _fingerprint([Text(text)])
    assert name == _fingerprint([Text(text.replace("a.7", "a.9").replace("b.2", "b.12"))])
    assert name != _fingerprint([Text(text.replace("add(%b.1, %a.7)", "add(%a.7, %b.1)"))])
    assert name != _fingerprint([Text(text.replace("0.25", "0.5"))])
