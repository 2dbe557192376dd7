"""What the PyTorch cycle is measured at: published shapes of targets and drafters, and a setting.

`random_pair.py` has the same shapes for our side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CYCLES_A_SAMPLE = 5  # replays between two events, so that a launch's latency is not counted


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The Gated-DeltaNet layers of a hybrid target: all but every fourth layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def conv_width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def in_width(self) -> int:
        """Rows of in_proj: the convolution's channels, z, beta and the decay."""
        return self.conv_width + self.value_width + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class Shapes:
    """A target and its drafter; the drafter has the target's widths but for `draft_sizes`."""

    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    draft_layers: int
    taps: tuple[int, ...]
    recurrent: Recurrent | None = None
    draft_sizes: tuple[int, int, int, int] | None = None  # ffn, heads, kv_heads, head_dim

    @property
    def rotary(self) -> int:
        """Dims of a head that turn: a quarter of a hybrid's."""
        return self.head_dim if self.recurrent is None else self.head_dim // 4

    @property
    def has_gate(self) -> bool:
        """Whether attention has an output gate, which qkv's last rows make."""
        return self.recurrent is not None

    @property
    def drafter(self) -> Shapes:
        """The same with the drafter's heads and feed-forward, and no recurrent layer."""
        sizes = self.draft_sizes or (self.ffn, self.heads, self.kv_heads, self.head_dim)
        ffn, heads, kv_heads, dim = sizes
        return replace(self, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=dim, recurrent=None)

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and layer % 4 != 3

    @property
    def attention_layers(self) -> int:
        return sum(not self.is_recurrent(i) for i in range(self.layers))


_DENSE_TAPS = (1, 9, 17, 25, 33)
SHAPES = {
    "qwen3-4b": Shapes(36, 2560, 9728, 32, 8, 128, 151936, True, 5, _DENSE_TAPS),
    "qwen3-8b": Shapes(36, 4096, 12288, 32, 8, 128, 151936, False, 5, _DENSE_TAPS),
    "qwen3.5-4b": Shapes(
        *(32, 2560, 9216, 16, 4, 256, 248320, True, 5, (1, 8, 15, 22, 29)),
        recurrent=Recurrent(16, 32, 128, 128, 4),
        draft_sizes=(9728, 32, 8, 128),
    ),
    "qwen3.8-27b": Shapes(
        *(64, 5120, 17408, 24, 4, 256, 248320, False, 5, (1, 16, 31, 46, 61)),
        recurrent=Recurrent(16, 48, 128, 128, 4),
        draft_sizes=(17408, 32, 8, 128),
    ),
    "tiny": Shapes(4, 64, 96, 4, 2, 16, 512, False, 2, (0, 2)),
    "tiny-hybrid": Shapes(
        *(5, 64, 96, 4, 2, 32, 512, False, 2, (0, 2)),
        recurrent=Recurrent(2, 4, 16, 16, 4),
        draft_sizes=(80, 4, 2, 16),
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What one measurement is of. `accept` drafts are accepted a cycle whatever the target says."""

    shapes: str
    batch: int
    context: int
    rows: int
    drafter: str
    accept: int
    mode: str
    recurrence: str = ""  # of a hybrid: "triton" or "unrolled"

    @property
    def model(self) -> Shapes:
        return SHAPES[self.shapes]

    @property
    def capacity(self) -> int:
        """Keys a cache holds: the context, what one sample commits, and the block after it."""
        needed = self.context + CYCLES_A_SAMPLE * (self.accept + 1) + 2 * self.rows
        return -(-needed // 64) * 64
