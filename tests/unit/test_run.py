"""How a run names what it compiled."""

import re

import jax
import jax.numpy as jnp

from dflash_jax.run import _fingerprint


class Text:
    """An executable of which only the text is known."""

    def __init__(self, text):
        self.as_text = lambda: text


def compiled(function):
    return jax.jit(lambda x: function(x) @ x).lower(jnp.ones((3, 3), jnp.float32)).compile()


def test_executables_are_named_by_their_instructions_and_not_by_their_source():
    executable = compiled(jnp.sin)
    # Moved within one text: what is compiled twice may come from a cache with the first's metadata.
    text = executable.as_text()
    moved = re.sub(r'op_name="[^"]*"', 'op_name="elsewhere"', text)
    moved = re.sub(r"stack_frame_id=\d+", "stack_frame_id=9999", moved)
    assert moved != text
    name = _fingerprint([executable])
    assert name == _fingerprint([Text(moved)])
    assert name != _fingerprint([compiled(jnp.cos)])


def test_the_numbers_of_names_are_not_part_of_an_executable_and_its_wiring_is():
    text = "%a.7 = f32[] constant(0.25)\n%b.1 = f32[] cosine(%a.7)\n%b.2 = f32[] add(%b.1, %a.7)"
    name = _fingerprint([Text(text)])
    assert name == _fingerprint([Text(text.replace("a.7", "a.9").replace("b.2", "b.12"))])
    assert name != _fingerprint([Text(text.replace("add(%b.1, %a.7)", "add(%a.7, %b.1)"))])
    assert name != _fingerprint([Text(text.replace("0.25", "0.5"))])
