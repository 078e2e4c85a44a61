"""The closed form that everything else refines: KV bytes a token under MHA, GQA and MQA."""

from __future__ import annotations

from typing import Literal

from .units import require_int


def attention_kind(num_heads: int, num_kv_heads: int) -> Literal["MHA", "GQA", "MQA"]:
    """How query heads share KV heads.

    MHA: each has its own. MQA: one KV head for all (Shazeer, 2019). GQA: ``num_heads / num_kv_heads`` query heads
    share one (Ainslie et al., 2023, section 2.2).

    Raises ValueError unless ``num_kv_heads`` divides ``num_heads``.
    """
    require_int("num_heads", num_heads, 1)
    require_int("num_kv_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads: got {num_kv_heads} KV heads for {num_heads} query heads")
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, bytes_per_value: int = 2) -> int:
    """Bytes of K and V that one token adds to the cache, over all layers.

    ::

        2 x num_layers x num_kv_heads x head_dim x bytes_per_value
        K and V

    ``num_kv_heads`` is what tells the kinds apart: ``num_heads`` for MHA, fewer for GQA, 1 for MQA, so their caches
    stand as H : G : 1. The number of *query* heads and the FLOPs of attention do not enter. For formats with scales,
    blocks, layers that differ or D_k != D_v see :class:`~labkit.kv_math.KVCacheSpec`.
    """
    for name, value in (("num_layers", num_layers), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        require_int(name, value, 1)
    require_int("bytes_per_value", bytes_per_value, 1)
    return 2 * num_layers * num_kv_heads * head_dim * bytes_per_value
