"""How one of K or V is stored: the width of a value, and who shares a scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .units import ceil_div, require_int

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4}
"""Width of one value, by dtype name."""

_ALIASES = {
    "float": "float32",
    "fp32": "float32",
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """Which values share one scale, as a box of tokens x heads x channels.

    ::

        tokens="layer", heads="all"                one scale a layer, fixed before the run     (per tensor)
        tokens="layer", heads=1                    one a head, fixed before the run            (per head)
        tokens=1,       heads=1                    one for each token and head                 (per token-head)
        tokens=1,       heads=1, channels=32       one for each 32 channels of those           (per group)
        tokens="block", heads=1, channels=1        one a channel, for the tokens of a block    (per channel: KIVI's K)
        tokens="block", heads=1                    one a head, for the tokens of a block       (per block and head)

    Scales with ``tokens="layer"`` exist once a layer; all others live and travel with their block.

    Attributes:
        tokens: 1 or more tokens (a divisor of the block size), all tokens of a "block", or of the whole "layer".
        heads: KV heads, a divisor of their number, or "all".
        channels: channels of a head (the last box may be smaller), or "all".
        scale_bits: bits of one scale: 8, 16 or 32.
        zero_point_bits: bits of the offset stored beside each scale; 0 for symmetric quantisation.

    Source of the per-channel layout: Liu et al., KIVI (ICML 2024), section 3.
    """

    tokens: int | Literal["block", "layer"]
    heads: int | Literal["all"] = 1
    channels: int | Literal["all"] = "all"
    scale_bits: int = 32
    zero_point_bits: int = 0

    def __post_init__(self) -> None:
        for name, value, words in (
            ("tokens", self.tokens, ("block", "layer")),
            ("heads", self.heads, ("all",)),
            ("channels", self.channels, ("all",)),
        ):
            if isinstance(value, str):
                if value not in words:
                    raise ValueError(f"{name} must be an int >= 1 or one of {words}, got {value!r}")
            else:
                require_int(name, value, 1)
        for name, bits, allowed in (
            ("scale_bits", self.scale_bits, (8, 16, 32)),
            ("zero_point_bits", self.zero_point_bits, (0, 4, 8, 16, 32)),
        ):
            if bits not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {bits!r}")

    def num_scales(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Scales of one block, or of one layer if ``tokens`` is "layer".

        Raises ValueError if a box would cross the edge of a block or leave heads over.
        """
        heads = num_kv_heads if self.heads == "all" else self.heads
        if num_kv_heads % heads:
            raise ValueError(f"heads={heads} must divide the number of KV heads, which is {num_kv_heads}")
        channels = head_dim if self.channels == "all" else self.channels
        boxes = num_kv_heads // heads * ceil_div(head_dim, channels)
        if isinstance(self.tokens, str):
            return boxes
        if block_size % self.tokens:
            raise ValueError(f"tokens={self.tokens} must divide the block size, which is {block_size}")
        return boxes * (block_size // self.tokens)

    def num_bytes(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of those scales and zero points, rounded up to whole bytes once."""
        bits = self.num_scales(num_kv_heads, head_dim, block_size) * (self.scale_bits + self.zero_point_bits)
        return ceil_div(bits, 8)


PER_TENSOR = ScaleLayout(tokens="layer", heads="all")
PER_HEAD = ScaleLayout(tokens="layer", heads=1)
PER_TOKEN_HEAD = ScaleLayout(tokens=1, heads=1)
PER_CHANNEL = ScaleLayout(tokens="block", heads=1, channels=1)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K, or V, of one layer is stored.

    Integers need scales; fp8 may go without (its values are then stored as they are, scale 1.0); wider floats have
    none. ``KVFormat.of("int8")`` gives the usual layout of a name.

    Raises ValueError for an unknown dtype name, or scales that do not go with it.
    """

    dtype: str
    scales: ScaleLayout | None = None

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ValueError(f"dtype must be one of {', '.join(BITS)}, got {self.dtype!r}")
        if self.scales is None and self.dtype in ("int8", "int4"):
            raise ValueError(
                f'dtype {self.dtype!r} needs scales: give a ScaleLayout, or use KVFormat.of("{self.dtype}")'
            )
        if self.scales is not None and self.bits > 8:
            raise ValueError(f"dtype {self.dtype!r} takes no scales, got {self.scales}")

    @classmethod
    def of(cls, dtype: object) -> KVFormat:
        """The format of a name ("bfloat16", "fp8", ...), of a torch or numpy dtype, or a format as it is.

        fp8 gets one fp32 scale a layer, int8 one fp32 scale for each token and head, int4 an fp16 scale and an fp16
        offset for each token and head. That is what V has under these names, and K too except for int4:
        :func:`kv_formats` gives both.

        Raises ValueError for an unknown name.
        """
        if isinstance(dtype, KVFormat):
            return dtype
        name = dtype_name(dtype)
        return cls(name, _USUAL_SCALES.get(name))

    @property
    def bits(self) -> int:
        """Bits of one stored value, without its share of a scale."""
        return BITS[self.dtype]

    @property
    def needs_tail(self) -> bool:
        """Whether tokens wait unquantised until their block is full, since they share a scale with later ones."""
        return self.scales is not None and self.scales.tokens not in (1, "layer")

    def bytes_per_block(self, num_kv_heads: int, head_dim: int, block_size: int) -> int:
        """Bytes of one block in one layer, scales included.

        Each head of each token begins at a whole byte: an odd number of int4 values wastes half a byte.
        """
        values = block_size * num_kv_heads * ceil_div(head_dim * self.bits, 8)
        if self.scales is None or self.scales.tokens == "layer":
            return values
        return values + self.scales.num_bytes(num_kv_heads, head_dim, block_size)

    def bytes_per_layer(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes of the scales that exist once a layer, outside the blocks; 0 if there are none."""
        if self.scales is None or self.scales.tokens != "layer":
            return 0
        return self.scales.num_bytes(num_kv_heads, head_dim, block_size=1)

    def bits_per_value(self, num_kv_heads: int, head_dim: int, block_size: int) -> float:
        """Bits a value takes in a full block, its share of the block's scales included."""
        values = num_kv_heads * head_dim * block_size
        return 8 * self.bytes_per_block(num_kv_heads, head_dim, block_size) / values

    def __str__(self) -> str:
        if self.scales is None:
            return self.dtype
        box = [self.scales.tokens if isinstance(self.scales.tokens, str) else _counted(self.scales.tokens, "token")]
        if self.scales.heads != "all":
            box.append(_counted(self.scales.heads, "head"))
        if self.scales.channels != "all":
            box.append(_counted(self.scales.channels, "channel"))
        offset = f" and {self.scales.zero_point_bits}-bit offset" if self.scales.zero_point_bits else ""
        return f"{self.dtype}, {self.scales.scale_bits}-bit scale{offset} per {' x '.join(box)}"


_USUAL_SCALES = {
    "fp8_e4m3": PER_TENSOR,
    "fp8_e5m2": PER_TENSOR,
    "int8": PER_TOKEN_HEAD,
    "int4": ScaleLayout(tokens=1, heads=1, scale_bits=16, zero_point_bits=16),
}
_INT4_KEY = KVFormat("int4", ScaleLayout(tokens="block", heads=1, channels=1, scale_bits=16, zero_point_bits=16))


def kv_formats(dtype: object, value_dtype: object = None) -> tuple[KVFormat, KVFormat]:
    """The formats of K and of V that a name stands for; V's name is K's if ``value_dtype`` is None.

    They are alike but for "int4", where K has one scale a channel for the tokens of a block and V one a token: at 4
    bits K is the problem, and its outliers are channels (Liu et al., KIVI, section 3). In blocks of 32 tokens, 4.75
    bits a value at a head size of 64, 4.625 at 128.

    Names, torch dtypes and formats as in :meth:`KVFormat.of`. Raises ValueError for an unknown name.
    """
    key = KVFormat.of(dtype)
    if key.dtype == "int4" and not isinstance(dtype, KVFormat):
        key = _INT4_KEY
    return key, KVFormat.of(dtype if value_dtype is None else value_dtype)


def usual_block_size(formats: Iterable[KVFormat]) -> int:
    """Tokens in a block unless another size is asked for: 16, or 32 where tokens of a block share scales."""
    return 32 if any(format.needs_tail for format in formats) else 16


def _counted(n: int, noun: str) -> str:
    return noun if n == 1 else f"{n} {noun}s"


def dtype_name(dtype: object) -> str:
    """The name that :data:`BITS` knows ``dtype`` by: "bf16", "torch.bfloat16" and torch.bfloat16 are "bfloat16".

    Raises ValueError for an unknown one.
    """
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in BITS:
        from difflib import get_close_matches  # costs more to import than the rest of this room

        close = get_close_matches(name, BITS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"dtype must be one of {', '.join(BITS)}, got {dtype!r}{hint}")
    return name
