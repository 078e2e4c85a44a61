"""How big is it?

Exact bytes of a KV cache and what fits a GPU, with nothing loaded but the standard library.

Exports the closed form :func:`kv_bytes_per_token` for MHA, GQA and MQA; :class:`KVFormat` (how K or V is stored, with
:class:`ScaleLayout` for who shares a scale; :func:`kv_formats` gives the pair that a name stands for) and
:class:`KVCacheSpec` (layers, blocks, requests, batches, also from a Hugging Face config); the catalogues :func:`gpu`
and :func:`model_shape`; :func:`plan_capacity`, which puts them together, and :func:`format_bytes`, which never shows
GiB as GB.
"""

from .attention import attention_kind, kv_bytes_per_token
from .cache_spec import KVCacheSpec, KVLayer
from .capacity import CapacityPlan, memory_bound_seconds, plan_capacity
from .formats import (
    BITS,
    PER_CHANNEL,
    PER_HEAD,
    PER_TENSOR,
    PER_TOKEN_HEAD,
    KVFormat,
    ScaleLayout,
    kv_formats,
    usual_block_size,
)
from .gpus import GPU, GPUS, gpu
from .model_shapes import MODEL_SHAPES, ModelShape, model_shape
from .units import GB, GIB, KIB, MIB, format_bytes, format_bytes_decimal

__all__ = [
    "BITS",
    "GB",
    "GIB",
    "GPU",
    "GPUS",
    "KIB",
    "MIB",
    "MODEL_SHAPES",
    "PER_CHANNEL",
    "PER_HEAD",
    "PER_TENSOR",
    "PER_TOKEN_HEAD",
    "CapacityPlan",
    "KVCacheSpec",
    "KVFormat",
    "KVLayer",
    "ModelShape",
    "ScaleLayout",
    "attention_kind",
    "format_bytes",
    "format_bytes_decimal",
    "gpu",
    "kv_bytes_per_token",
    "kv_formats",
    "memory_bound_seconds",
    "model_shape",
    "plan_capacity",
    "usual_block_size",
]
