"""How small, at what loss?

The reference quantiser: plain torch, the one that kernels are tested against. Exports :func:`quantise`,
:func:`dequantise`, :func:`round_trip` and :func:`measure_scales` for the formats of :mod:`labkit.kv_math`;
:func:`hadamard`, which spreads outlier channels; :func:`quant_error`; :class:`KVPolicy`, a format for K and V of each
layer; and :func:`save_scales` / :func:`load_scales` for scales that are fixed before a run.

    from labkit.quant import KVFormat, dequantise, quantise
    small = quantise(k, KVFormat.of("int8"))      # k [num_tokens, num_heads, head_dim]
    small.num_bytes, dequantise(small)
"""

from labkit.kv_math import KVFormat, ScaleLayout

from .int4 import pack_int4, unpack_int4
from .metrics import QuantError, quant_error
from .policy import KVPolicy
from .quantiser import Quantised, dequantise, quantise, round_trip
from .rotation import hadamard
from .scales import Scales, measure_scales
from .static_scales import LayerScales, load_scales, save_scales

__all__ = [
    "KVFormat",
    "KVPolicy",
    "LayerScales",
    "QuantError",
    "Quantised",
    "ScaleLayout",
    "Scales",
    "dequantise",
    "hadamard",
    "load_scales",
    "measure_scales",
    "pack_int4",
    "quant_error",
    "quantise",
    "round_trip",
    "save_scales",
    "unpack_int4",
]
