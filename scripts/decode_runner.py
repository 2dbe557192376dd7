"""A decode that stands at a given context: carriers of random keys, chunks run and timed.

Nothing is prefilled: `seq_lens` are set over pools of random keys and values in shuffled pages,
which costs a cycle the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode_stages import kernel_table, stage_times
from random_pair import materialise

from dflash_jax import loop
from dflash_jax.drafters import oracle_drafter
from dflash_jax.scratch import init_scratch
from dflash_jax.state import Status, init_buffers, init_state


@jax.jit
def _copied(tree: Any) -> Any:
    """The tree in memory of its own."""
    return jax.tree.map(jnp.copy, tree)


class Runner:
    """Carriers of one configuration and what is done with them."""

    def __init__(
        self,
        params: Any,
        context: int,
        fixed: Any,
        options: Any,
        decode: Callable[..., Any] = loop.decode,
    ) -> None:
        self.params, self.context, self.fixed, self.options = params, context, fixed, options
        self.decode = decode
        self.plain_ms: float | None = None
        self.compile_seconds, self.temp_bytes = 0.0, 0
        self.scratch = init_scratch(params.draft.config, fixed=fixed)
        buffers = jax.eval_shape(lambda: init_buffers(fixed))
        k_pools, v_pools = materialise((buffers.k_pools, buffers.v_pools), scale=1.0, seed=1)
        small = buffers.replace(k_pools=(), v_pools=())
        small = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), small)
        pages = jax.random.permutation(jax.random.key(2), fixed.num_pages).astype(jnp.int32)
        table = pages.reshape(fixed.batch, -1)
        meta = small.meta.replace(block_table=table)
        if small.verify_wy_tables is not None:
            slots = jnp.arange(fixed.batch, dtype=jnp.int32)
            small = small.replace(verify_wy_tables=slots)
        self.buffers: Any = small.replace(meta=meta, k_pools=k_pools, v_pools=v_pools)
        # Keys are found by their positions; a recurrent state has to be set back.
        self.states = None if small.gdn is None else _copied(small.gdn)
        self.last: Any = None

    def start(self, *, keep: int | None = None) -> Any:
        """A state whose sequences all stand at the asked context."""
        state: Any = init_state(self.fixed)
        every = jnp.full_like(state.seq_lens, 1)
        return state.replace(
            seq_lens=every * self.context,
            anchor=jnp.arange(1, self.fixed.batch + 1, dtype=jnp.int32),
            remaining=every * (1 << 20),
            max_lens=every * self.fixed.capacity,
            keep=every * (self.fixed.num_drafts if keep is None else keep),
            status=every * int(Status.ACTIVE),
        )

    def rewind(self) -> None:
        """Set recurrent states back to where every chunk starts."""
        if self.states is not None:
            self.buffers = self.buffers.replace(gdn=_copied(self.states))

    def chunk(self, state: Any) -> Any:
        """Run one chunk; its record and the state after it."""
        record, state, self.buffers, self.scratch = self.decode(
            self.params,
            state,
            self.buffers,
            self.scratch,
            fixed=self.fixed,
            options=self.options,
        )
        return record, state

    def continue_plainly(self, count: int) -> Any:
        """i32[B, S]: the target's own next `count` tokens, by the same executable."""
        state = self.start(keep=0)
        unknown = jnp.zeros((self.fixed.batch, self.fixed.capacity + 1), jnp.int32)
        inner = self.params.draft
        self.params = self.params.replace(
            draft=oracle_drafter(unknown, num_drafts=self.fixed.num_drafts, inner=inner)
        )
        self._compile(state)
        self.rewind()
        taken = []
        for _ in range(-(-count // self.options.cycles)):
            began = time.perf_counter()
            _, state = self.chunk(state)
            jax.block_until_ready(state)
            taken.append(1000 * (time.perf_counter() - began) / self.options.cycles)
        self.plain_ms = statistics.median(taken[1:] or taken)
        return state.tokens

    def time_chunks(self, chunks: int) -> list[float]:
        """ms a cycle of each chunk; the next one is launched before the last is waited for."""
        states = [self.start() for _ in range(chunks + 3)]
        if not self.compile_seconds:
            self._compile(states[0])
        jax.block_until_ready((states, self.buffers, self.scratch))
        ends = []
        waiting = None
        for state in states:
            self.rewind()
            record, _ = self.chunk(state)
            if waiting is not None:
                jax.block_until_ready(waiting)
                ends.append(time.perf_counter())
            waiting = record
        jax.block_until_ready(waiting)
        self.last = waiting
        steps = [b - a for a, b in zip(ends, ends[1:], strict=False)]
        return [1000 * step / self.options.cycles for step in steps[1:]]

    def accepted(self) -> set[int]:
        """Which numbers of drafts the last chunk's cycles accepted."""
        if int(self.last.num_cycles) != self.options.cycles:
            raise RuntimeError(f"{self.last.num_cycles} of {self.options.cycles} cycles ran")
        return set(np.asarray(self.last.num_accepted).ravel().tolist())

    def stages(self, samples: int) -> dict[str, float]:
        """ms of propose, verify and commit apart."""
        times, carried = stage_times(
            self.params,
            self.start(),
            self.buffers,
            self.scratch,
            fixed=self.fixed,
            impl=self.options.impl,
            samples=samples,
        )
        self.buffers, self.scratch = carried
        return {f"{name}_ms": ms for name, ms in times.items()}

    def kernels(self, top: int = 25) -> list[dict[str, Any]]:
        """Device time by kernel of one cycle, longest first.

        A chunk of one cycle: of a loop in one graph the profiler sees the first turn alone.
        """
        known, self.options = self.options, replace(self.options, cycles=1)
        jax.block_until_ready(self.chunk(self.start())[0])  # compiles
        states = iter([self.start(), self.start()])
        rows = kernel_table(lambda: self.chunk(next(states))[0], 1, top)
        self.options = known
        return rows

    def free(self) -> None:
        """Drop the carriers before the next configuration asks for its own."""
        self.buffers = self.scratch = self.last = None

    def _compile(self, state: Any) -> None:
        began = time.perf_counter()
        compiled = self.decode.lower(
            self.params,
            state,
            self.buffers,
            self.scratch,
            fixed=self.fixed,
            options=self.options,
        ).compile()
        self.compile_seconds = time.perf_counter() - began
        memory = compiled.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory is not None else 0
