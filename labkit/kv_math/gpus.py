"""GPUs by name: memory, bandwidth, arithmetic rate.

Memory is what nvidia-smi reports in total, which is what a program can hope for (an H200 sold as 141 GB reports
143,771 MiB). Bandwidth and rates are the vendor's peak figures, from the source named beside each; measured ones are a
few percent lower (H200, one 8 GiB read: 4.60 of 4.80 TB/s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from .units import MIB, format_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU.

    Attributes:
        memory_bytes: device memory as nvidia-smi totals it.
        bandwidth: peak memory bandwidth, bytes a second.
        flops_16bit: dense bf16 tensor-core rate with fp32 accumulation, FLOP a second; fp16 where there is no bf16.
        compute_capability: (major, minor), as in sm_90.
        source: where bandwidth and rate are from.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops_16bit: float
    compute_capability: tuple[int, int]
    source: str

    @property
    def supports_bf16(self) -> bool:
        """bfloat16 tensor cores: sm_80 or newer."""
        return self.compute_capability >= (8, 0)

    @property
    def supports_fp8(self) -> bool:
        """fp8 conversion and tensor cores: sm_89 or newer."""
        return self.compute_capability >= (8, 9)

    def __str__(self) -> str:
        return f"{self.name} ({format_bytes(self.memory_bytes)}, {self.bandwidth / 1e9:,.0f} GB/s)"


def _gpu(name: str, mib: int, gb_per_s: float, tflops: float, capability: tuple[int, int], source: str) -> GPU:
    return GPU(name, mib * MIB, gb_per_s * 1e9, tflops * 1e12, capability, source)


GPUS: dict[str, GPU] = {
    # Rates with sparsity, where a datasheet gives only those, are halved.
    "v100-16gb": _gpu("V100 SXM2 16 GB", 16384, 900, 125, (7, 0), "NVIDIA V100 datasheet"),
    "v100-32gb": _gpu("V100 SXM2 32 GB", 32768, 900, 125, (7, 0), "NVIDIA V100 datasheet"),
    "t4": _gpu("T4", 15360, 320, 65, (7, 5), "NVIDIA T4 datasheet"),
    "a100-40gb": _gpu("A100 SXM4 40 GB", 40960, 1555, 312, (8, 0), "NVIDIA A100 datasheet"),
    "a100-80gb": _gpu("A100 SXM4 80 GB", 81920, 2039, 312, (8, 0), "NVIDIA A100 datasheet"),
    "a10": _gpu("A10", 23028, 600, 125, (8, 6), "NVIDIA A10 datasheet"),
    "rtx-3090": _gpu("GeForce RTX 3090", 24576, 936, 71, (8, 6), "NVIDIA GA102 whitepaper"),
    "rtx-4090": _gpu("GeForce RTX 4090", 24564, 1008, 165.2, (8, 9), "NVIDIA Ada whitepaper"),
    "l4": _gpu("L4", 23034, 300, 121, (8, 9), "NVIDIA L4 datasheet"),
    "l40s": _gpu("L40S", 46068, 864, 362, (8, 9), "NVIDIA L40S datasheet"),
    "h100-sxm": _gpu("H100 SXM5 80 GB", 81559, 3350, 989.5, (9, 0), "NVIDIA H100 datasheet"),
    "h100-pcie": _gpu("H100 PCIe 80 GB", 81559, 2000, 756.5, (9, 0), "NVIDIA H100 datasheet"),
    "h200": _gpu("H200 SXM", 143771, 4800, 989.5, (9, 0), "NVIDIA H200 datasheet"),
    "b200": _gpu("B200 SXM", 183359, 8000, 2250, (10, 0), "NVIDIA DGX B200 datasheet"),
    "rtx-5090": _gpu("GeForce RTX 5090", 32607, 1792, 209.5, (12, 0), "NVIDIA RTX Blackwell whitepaper"),
}


def gpu(name: str) -> GPU:
    """Look up a GPU of :data:`GPUS` by name, such as "h200" or "A100 80GB".

    Raises ValueError, with the nearest names, if there is none; TypeError if ``name`` is no string.
    """
    return look_up(name, GPUS, "GPU")


def look_up(name: str, table: Mapping[str, T], what: str) -> T:
    """The entry of ``table`` called ``name``; letter case, spaces, dashes and underscores do not matter."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a {what} must be a string, got {name!r}")
    plain = {_plain(key): key for key in table}
    if _plain(name) in plain:
        return table[plain[_plain(name)]]
    from difflib import get_close_matches  # costs more to import than the rest of this room

    near = [key for key in table if _plain(key).startswith(_plain(name))] if name.strip() else []
    near = near or [plain[key] for key in get_close_matches(_plain(name), plain, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown {what} {name!r}: {hint}Known: {', '.join(table)}")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == ".")
