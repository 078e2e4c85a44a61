"""Which model?

Exports :func:`load_model` (the embedded model, the hub, a folder, a GGUF file), :func:`random_model` (a named shape
for measuring speed; :class:`RandomWeights` names one that is yet to be made), :func:`check_support` and
:func:`require_supported` (can the engine run it, and why not), :func:`fuse_decoder_layers`, which makes a loaded model
fast, and :func:`convert_kv_heads`, another number of KV heads.
"""

from . import quiet  # noqa: F401  first, since it is how transformers is imported
from .embedded import fetch
from .fp8_weights import quantise_weights
from .fused import FusedAttentionInfo, FusionReport, fuse_decoder_layers
from .kv_heads import HeadConversion, convert_kv_heads
from .loading import load_model
from .random_weights import RandomWeights, random_model
from .support import SupportReport, check_support, explain_support, read_config, require_supported

__all__ = [
    "FusedAttentionInfo",
    "FusionReport",
    "HeadConversion",
    "RandomWeights",
    "SupportReport",
    "check_support",
    "convert_kv_heads",
    "explain_support",
    "fetch",
    "fuse_decoder_layers",
    "load_model",
    "quantise_weights",
    "random_model",
    "read_config",
    "require_supported",
]
