"""One prompt on its way: what the device has reported of it so far, and its text.

Stop strings are looked for here, since they are text: token by token, so that an answer ends with
the token that completes one, whichever block or chunk that came in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_jax.sampling import GREEDY, SamplingOptions
from dflash_jax.state import Status
from dflash_jax.tokenizer import StreamDecoder


@dataclass(slots=True, eq=False)
class Tracked:
    """A request and its answer; `take_text` hands out text that no stop string can still claim."""

    index: int
    prompt: np.ndarray  # i32[T]
    budget: int
    decoder: StreamDecoder | None
    sampling: SamplingOptions = GREEDY  # with a seed, if it draws
    batch_index: int = 0
    status: int = Status.EMPTY
    ids: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cycles: list[dict[str, np.ndarray]] = field(default_factory=list)  # records, one a chunk
    started: float = 0.0  # when its prefill was given to the device
    queued: float = float("nan")  # seconds until the device began with it
    ttft: float = float("nan")
    decode_seconds: float = 0.0
    text: str = ""
    has_draft_fault: bool = False  # the drafter's numbers were not finite some time
    stop_string: str | None = None  # the one that ended the answer
    _pending: str = ""  # decoded, not handed out
    _num_read: int = 0  # ids that the decoder has

    def read(self) -> None:
        """Decode the ids that came in; a stop string among them ends the answer there.

        A stop token is no text, even when it is an ordinary token that the caller chose.
        """
        if self.decoder is None:
            return
        end = len(self.ids) - (self.status == Status.STOP)
        if not self.sampling.stop:
            self._pending += self.decoder.push(self.ids[self._num_read : end])
            self._num_read = len(self.ids)
        while self._num_read < end and self.stop_string is None:
            self._pending += self.decoder.push([self.ids[self._num_read]])
            self._num_read += 1
            self._find_stop()
        if self.status != Status.ACTIVE and self.stop_string is None:
            self._pending += self.decoder.flush()
            self._find_stop()

    def _find_stop(self) -> None:
        found = [(self._pending.find(stop), stop) for stop in self.sampling.stop]
        found = [(at, -len(stop), stop) for at, stop in found if at >= 0]
        if not found:
            return
        at, _, self.stop_string = min(found)
        self._pending = self._pending[:at]
        self.status = Status.STOP
        self._cut(self._num_read)

    def _cut(self, count: int) -> None:
        """Keep `count` ids, and of all records what belongs to them."""
        for records in (self.ids, self.hashes, self.logprobs):
            del records[count:]
        left = count - 1  # the first token belongs to no cycle
        for chunk in self.cycles:
            before = np.concatenate([[0], np.cumsum(chunk["committed"])[:-1]])
            kept = np.clip(left - before, 0, chunk["committed"])
            left -= int(kept.sum())
            ran = kept > 0
            chunk["committed"] = kept.astype(np.int32)
            chunk["accepted"] = np.minimum(chunk["accepted"], chunk["committed"])
            for name in chunk:
                chunk[name] = chunk[name][ran]

    def take_text(self) -> str:
        """The text that became final since the last call; all of it once finished."""
        held = 0 if self.status != Status.ACTIVE else _held_back(self._pending, self.sampling.stop)
        end = len(self._pending) - held
        piece, self._pending = self._pending[:end], self._pending[end:]
        self.text += piece
        return piece


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that a stop string may begin with."""
    longest = max(map(len, stops), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
