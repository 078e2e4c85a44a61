"""What ``kv_cache_dtype`` and ``kv_scales`` ask for, checked."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import torch

from labkit.kv_math import BITS
from labkit.quant import KVPolicy, LayerScales, load_scales

_NAMES = ("auto", "fp8", *BITS)


def resolve_policy(kv_cache_dtype: str | KVPolicy) -> KVPolicy | None:
    """The policy of a name, or the policy itself; None for "auto", what the model computes.

    Raises ValueError for an unknown name, TypeError for anything else.
    """
    if isinstance(kv_cache_dtype, KVPolicy):
        return kv_cache_dtype
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype must be a name or a labkit.quant.KVPolicy, got {kv_cache_dtype!r}")
    if kv_cache_dtype not in _NAMES:
        close = get_close_matches(kv_cache_dtype, _NAMES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"kv_cache_dtype must be one of {', '.join(_NAMES)} or a KVPolicy, got {kv_cache_dtype!r}{hint}"
        )
    return None if kv_cache_dtype == "auto" else KVPolicy.of(kv_cache_dtype)


def require_support(policy: KVPolicy, device: torch.device) -> None:
    """Raise ValueError for fp8 on a GPU older than sm_89."""
    if device.type != "cuda" or not any(format.dtype.startswith("fp8") for format in policy.all_formats):
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ValueError(
            f"kv_cache_dtype with fp8 needs a GPU of sm_89 or newer, {torch.cuda.get_device_name(device)} is "
            f"sm_{major}{minor}: use kv_cache_dtype='int8'"
        )


def read_scales(kv_scales: str | Path | None, policy: KVPolicy | None) -> Mapping[int, LayerScales] | None:
    """The scales in the file ``kv_scales``; None for None.

    Raises ValueError if no format of the policy has scales that are fixed before the run, and as
    :func:`labkit.quant.load_scales`.
    """
    if kv_scales is None:
        return None
    if policy is None or not any(f.scales is not None and f.scales.tokens == "layer" for f in policy.all_formats):
        raise ValueError(
            f"kv_scales={str(kv_scales)!r} goes with a kv_cache_dtype whose scales are fixed before the run, such as "
            f"'fp8'; got {'auto' if policy is None else policy}"
        )
    return load_scales(kv_scales, policy)
