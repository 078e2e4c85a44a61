"""The edge of the device's memory: a cap below it, and what to do when it is reached."""

from __future__ import annotations

import ctypes

import torch

GIB = 1 << 30


def cap_memory(device: torch.device, num_bytes: int | None) -> None:
    """Let torch take at most ``num_bytes`` of a GPU in this process; None lifts the cap. Nothing on a CPU."""
    if device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        fraction = 1.0 if num_bytes is None else min(1.0, num_bytes / total)
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def keep_for_good(thing: object) -> None:
    """Never free ``thing``: torch ends the process when pinned memory is freed after its device has failed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def weights_do_not_fit(name: object, device: torch.device) -> RuntimeError:
    """The error for a model that ran out of memory while it was loaded."""
    free, total = torch.cuda.mem_get_info(device)
    return RuntimeError(
        f"the weights of {name} do not fit on {device}: it has {total / GIB:.2f} GiB and {free / GIB:.2f} GiB of them "
        "are free now; free memory there, choose a dtype with fewer bytes (dtype='bfloat16') or a smaller model"
    )


def engine_does_not_fit(device: torch.device, gpu_memory_utilization: float, error: Exception) -> RuntimeError:
    """The error for an engine that ran out of memory while it was made, although the plan had room for it."""
    free, total = torch.cuda.mem_get_info(device)
    lower = max(0.01, round(gpu_memory_utilization - max(0.03, GIB / total), 2))
    return RuntimeError(
        f"{device} ran out of memory while the engine was made, with {free / GIB:.2f} of {total / GIB:.2f} GiB free: "
        f"lower gpu_memory_utilization from {gpu_memory_utilization} to {lower}, which makes the KV pool "
        f"{(gpu_memory_utilization - lower) * total / GIB:.2f} GiB smaller, or lower max_num_seqs ({error})"
    )
