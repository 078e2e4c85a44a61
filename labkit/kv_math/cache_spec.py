"""The size of a KV cache, in exact bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from .formats import BITS, KVFormat, dtype_name, kv_formats
from .hf_config import read_kv_layers
from .units import ceil_div, format_bytes, require_int


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one layer keeps of a token: ``num_kv_heads`` keys of ``head_dim`` and values of ``head_dim_v``."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    key: KVFormat
    value: KVFormat

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "head_dim_v"):
            require_int(name, getattr(self, name), 1)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of K and V of one block in this layer, scales included."""
        return self.key.bytes_per_block(self.num_kv_heads, self.head_dim, block_size) + self.value.bytes_per_block(
            self.num_kv_heads, self.head_dim_v, block_size
        )

    @property
    def fixed_bytes(self) -> int:
        """Bytes of scales that this layer keeps once, outside its blocks."""
        return self.key.bytes_per_layer(self.num_kv_heads, self.head_dim) + self.value.bytes_per_layer(
            self.num_kv_heads, self.head_dim_v
        )

    @property
    def tail_values_per_token(self) -> int:
        """Values of a token that wait unquantised for their block to fill (:attr:`KVFormat.needs_tail`)."""
        return self.num_kv_heads * (self.head_dim * self.key.needs_tail + self.head_dim_v * self.value.needs_tail)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class KVCacheSpec:
    """The layers of a paged KV cache and its block size; every byte count is an exact integer.

    A block holds ``block_size`` tokens in *all* layers. A sliding-window layer is counted like any other: its block
    has its place whether or not a later token still looks at it. Layers that read another layer's cache are left out.

    Attributes:
        layers: one :class:`KVLayer` for each layer with a cache of its own.
        block_size: tokens in a block; 1 gives sizes without block rounding.
        bytes_per_block: K and V of ``block_size`` tokens in all layers, with the scales that live in the block.
    """

    layers: tuple[KVLayer, ...]
    block_size: int
    bytes_per_block: int

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: object = "bfloat16",
        block_size: int = 16,
        *,
        head_dim_v: int | None = None,
        value_dtype: object = None,
    ) -> None:
        """Layers that are all alike. ``head_dim_v`` and ``value_dtype`` follow ``head_dim`` and ``dtype`` if None.

        Dtypes are as in :func:`~labkit.kv_math.kv_formats`. Raises ValueError for a size below 1, an unknown dtype or
        scales that do not fit the block; TypeError for a size that is no int.
        """
        require_int("num_layers", num_layers, 1)
        key, value = kv_formats(dtype, value_dtype)
        layer = KVLayer(num_kv_heads, head_dim, head_dim if head_dim_v is None else head_dim_v, key, value)
        self._set((layer,) * num_layers, block_size)

    @classmethod
    def from_layers(cls, layers: Iterable[KVLayer], block_size: int = 16) -> KVCacheSpec:
        """Layers that may differ in heads, head size and format."""
        spec = cls.__new__(cls)
        spec._set(tuple(layers), block_size)
        return spec

    @classmethod
    def from_config(
        cls, hf_config: Any, dtype: object = "auto", block_size: int = 16, *, value_dtype: object = None
    ) -> KVCacheSpec:
        """The cache of a Hugging Face model, from its config (an object, or the dict of a config.json).

        Knows GQA and MQA under their many names, multimodal wrappers, layers that differ, and layers that share
        another's cache (gemma3n). MLA is counted as attention functions receive it, K and V expanded for all heads
        (DeepSeek-V3: D_k 192, D_v 128), not as the compressed latent. ``dtype`` "auto" is the config's own, bfloat16
        if it has none.

        Raises ValueError, naming the config's model type, for models with layers that have no KV cache.
        """
        shapes, config_dtype = read_kv_layers(hf_config)
        key, value = kv_formats((config_dtype or "bfloat16") if dtype == "auto" else dtype, value_dtype)
        return cls.from_layers([KVLayer(*shape, key, value) for shape in shapes], block_size)

    def _set(self, layers: tuple[KVLayer, ...], block_size: int) -> None:
        if not layers:
            raise ValueError("layers must hold at least one layer, got none")
        require_int("block_size", block_size, 1)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "block_size", block_size)
        object.__setattr__(self, "bytes_per_block", sum(layer.bytes_per_block(block_size) for layer in layers))

    def with_formats(
        self, dtype: object, value_dtype: object = None, *, layers: Sequence[int] | None = None
    ) -> KVCacheSpec:
        """This cache in another format, in all layers or in those numbered ``layers`` (negative: from the end).

        ``spec.with_formats("int8").with_formats("bfloat16", layers=[0, -1])`` keeps the first and last layer in 16 bit.
        Raises ValueError for a layer number that does not exist.
        """
        key, value = kv_formats(dtype, value_dtype)
        n = len(self.layers)
        for i in layers or ():
            if not -n <= i < n:
                raise ValueError(f"layers must be within [{-n}, {n}), got {i}")
        chosen = set(range(n)) if layers is None else {i % n for i in layers}
        return KVCacheSpec.from_layers(
            [replace(la, key=key, value=value) if i in chosen else la for i, la in enumerate(self.layers)],
            self.block_size,
        )

    @property
    def num_layers(self) -> int:
        """Layers with a cache of their own."""
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """A token's share of a full block, rounded up to a byte where scales shared by tokens do not divide evenly."""
        return ceil_div(self.bytes_per_block, self.block_size)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of scales that exist once a layer, however many blocks there are."""
        return sum(layer.fixed_bytes for layer in self.layers)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens of one request."""
        return ceil_div(require_int("num_tokens", num_tokens, 0), self.block_size)

    def bytes_for_request(self, num_tokens: int) -> int:
        """Bytes of the blocks of a request, the empty slots of its last block included."""
        return self.blocks_for(num_tokens) * self.bytes_per_block

    def bytes_for_batch(self, lengths: Iterable[int]) -> int:
        """Bytes of the blocks of requests that share none, each rounded up to whole blocks."""
        return sum(map(self.blocks_for, lengths)) * self.bytes_per_block

    def bytes_for_pool(self, num_blocks: int) -> int:
        """Bytes of a pool of blocks together with the scales outside it: what an engine allocates."""
        return require_int("num_blocks", num_blocks, 0) * self.bytes_per_block + self.fixed_bytes

    def bytes_for_tails(self, num_seqs: int, dtype: object = "bfloat16") -> int:
        """Bytes in which the unfinished blocks of ``num_seqs`` running sequences wait, as values of ``dtype``.

        0 unless a format has scales that tokens of a block share. Not part of the pool.
        """
        values = self.block_size * sum(layer.tail_values_per_token for layer in self.layers)
        return require_int("num_seqs", num_seqs, 0) * values * BITS[dtype_name(dtype)] // 8

    def __repr__(self) -> str:
        sizes = f"{self.num_layers} layers, {self.bytes_per_token} bytes a token"
        return f"<KVCacheSpec: {sizes}, blocks of {self.block_size}>"

    def __str__(self) -> str:
        token, block = format_bytes(self.bytes_per_token), format_bytes(self.bytes_per_block)
        lines = [f"{token} a token, {block} a block of {self.block_size} tokens"]
        for layer, run in groupby(self.layers):
            lines.append(
                f"  {len(list(run))} layers x {layer.num_kv_heads} KV heads: "
                f"K {layer.head_dim} values of {layer.key}; V {layer.head_dim_v} values of {layer.value}"
            )
        return "\n".join(lines)
