"""Which format K and V have in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.kv_math import KVCacheSpec, KVFormat, kv_formats

from .rotation import hadamard
from .scales import check_format


@dataclass(frozen=True, slots=True)
class KVPolicy:
    """A format for K and one for V, layers that differ, and whether q and k are rotated before K is stored.

    ``KVPolicy.of("int8")``, ``KVPolicy.of("int4", "int8")``; ``.with_layers([0, -1], "bfloat16")`` keeps the first and
    the last layer in 16 bit. ``KVPolicy.of("int4")`` has KIVI's axes: K one scale a channel, V one a token.

    Attributes:
        key, value: the formats of all layers that are not named in ``exceptions``.
        rotate: multiply q and k, after RoPE, by :func:`hadamard` of the head size.
        exceptions: (layer, key, value); negative layers count from the end, the last mention of a layer holds.
    """

    key: KVFormat
    value: KVFormat
    rotate: bool = False
    exceptions: tuple[tuple[int, KVFormat, KVFormat], ...] = ()

    def __post_init__(self) -> None:
        for format in self.all_formats:
            if not isinstance(format, KVFormat):
                raise TypeError(f"formats must be KVFormat (KVPolicy.of takes names), got {format!r}")
            check_format(format)

    @classmethod
    def of(cls, key: object, value: object = None, *, rotate: bool = False) -> KVPolicy:
        """All layers alike, by what :func:`~labkit.kv_math.kv_formats` takes: names ("int8", "fp8", ...) or formats.

        Raises ValueError for an unknown name, and for formats that cannot be stored.
        """
        return cls(*kv_formats(key, value), rotate)

    @property
    def all_formats(self) -> tuple[KVFormat, ...]:
        """Every format that the policy names."""
        return (self.key, self.value, *(format for _, *pair in self.exceptions for format in pair))

    def with_layers(self, layers: Sequence[int], key: object, value: object = None) -> KVPolicy:
        """This policy with other formats in ``layers``."""
        other = KVPolicy.of(key, value)
        return replace(self, exceptions=(*self.exceptions, *((layer, other.key, other.value) for layer in layers)))

    def formats(self, layer: int, num_layers: int) -> tuple[KVFormat, KVFormat]:
        """Formats of K and V of a layer. Raises ValueError for layers that do not exist, here or in the policy."""
        for number in (layer, *(exception[0] for exception in self.exceptions)):
            if not -num_layers <= number < num_layers:
                raise ValueError(f"layers must be within [{-num_layers}, {num_layers}), got {number}")
        chosen = self.key, self.value
        for number, key, value in self.exceptions:
            if (number - layer) % num_layers == 0:
                chosen = key, value
        return chosen

    def apply_to(self, spec: KVCacheSpec) -> KVCacheSpec:
        """``spec`` in these formats: its exact bytes, scales included.

        Raises ValueError if a layer does not exist, a box of scales does not fit heads or blocks, or a rotation is
        asked for that does not exist for the head size.
        """
        layers = []
        for number, layer in enumerate(spec.layers):
            key, value = self.formats(number, spec.num_layers)
            if self.rotate:
                hadamard(layer.head_dim)
            layers.append(replace(layer, key=key, value=value))
        return KVCacheSpec.from_layers(layers, spec.block_size)

    def bits_per_value(self, spec: KVCacheSpec) -> float:
        """Bits that a value of the cache takes in a full block, K and V of all layers, scales included."""
        values = spec.block_size * sum(la.num_kv_heads * (la.head_dim + la.head_dim_v) for la in spec.layers)
        return 8 * self.apply_to(spec).bytes_per_block / values

    def __str__(self) -> str:
        text = f"K {self.key}; V {self.value}"
        if self.rotate:
            text += "; q and k rotated"
        return text + "".join(f"; layer {number}: K {key}; V {value}" for number, key, value in self.exceptions)
