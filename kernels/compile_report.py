"""Compile every shipped configuration for its GPU generation, on a machine without a GPU.

    python -m labkit.kernels.compile_report            one JSON line a configuration

Reports registers, spilled bytes and shared memory as ptxas and Triton give them. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import tuning
from .attention import AttentionLaunch, KernelCall, Workspace
from .pages import KVPages
from .tuning import DecodeTile, PrefillTile

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
HEADS = [  # query heads, KV heads, head_dim_k, head_dim_v: each row of the tables, MHA and GQA, and a padded size
    (32, 32, 128, 128),
    (32, 8, 128, 128),
    (32, 1, 128, 128),
    (9, 3, 64, 64),
    (32, 32, 80, 80),
    (16, 16, 192, 128),
    (8, 4, 256, 256),
]


def example_call(
    kind: str,
    capability: int,
    heads: tuple[int, int, int, int],
    tile: DecodeTile | PrefillTile | None = None,
    pairs_per_sm: float = 0,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> KernelCall:
    """The call `paged_attention` would make for these heads, or the one with `tile`, on tensors without memory."""
    num_q_heads, num_kv_heads, dim_k, dim_v = heads
    meta = dict(device="meta")
    kv = KVPages(
        torch.empty(64, num_kv_heads, block_size, dim_k, dtype=dtype, **meta),
        torch.empty(64, num_kv_heads, block_size, dim_v, dtype=dtype, **meta),
    )
    q = torch.empty(32, num_q_heads, dim_k, dtype=dtype, **meta)
    out = torch.empty(32, num_q_heads, dim_v, dtype=dtype, **meta)
    table, lens, starts = (torch.empty(s, dtype=torch.int32, **meta) for s in ((32, 64), (32,), (33,)))
    dk, dv, group = triton.next_power_of_2(dim_k), triton.next_power_of_2(dim_v), num_q_heads // num_kv_heads
    launch = AttentionLaunch(q, kv, table, lens, starts, out, dim_k**-0.5, None, None, None, group, dk, dv)
    decode = tuning.decode_tile(capability, group, max(dim_k, dim_v), pairs_per_sm, dtype.itemsize)
    if kind == "decode":
        return launch.decode(tile or decode, Workspace.with_capacity(4096, dv, torch.device("meta")), 1, 1)
    tile = tile or tuning.prefill_tile(capability, group, max(dim_k, dim_v), dtype.itemsize)
    return launch.prefill(tile, decode.block_m)


def compile_call(call: KernelCall, capability: int) -> dict[str, Any]:
    """Compile for a compute capability such as 90; {registers, spill_bytes, shared_bytes, wgmma, mma}."""
    signature, constants, attributes = {}, {}, {}
    names = call.kernel.arg_names
    for i, name in enumerate(names):
        value = call.constants[name] if name in call.constants else call.arguments[i]
        if name in call.constants or (isinstance(value, int) and value == 1):  # a stride of 1 is baked in, as at launch
            signature[name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(fn=call.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=call.options())
    sass_report = resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return sass_report | {
        "shared_bytes": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack (spills live there) that `cuobjdump --dump-resource-usage` reads off the machine code."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {text[:200]}")
    return {"registers": int(found[1]), "spill_bytes": int(found[2])}


def report(capabilities: tuple[int, ...] = (80, 90, 100)) -> Iterator[dict[str, Any]]:
    for capability in capabilities:
        for heads in HEADS:
            seen = set()
            for kind, pairs_per_sm in (("decode", 0), ("decode", 1), ("decode", 64), ("prefill", 0)):
                call = example_call(kind, capability, heads, pairs_per_sm=pairs_per_sm)
                if (kind, call.tile) in seen:
                    continue
                seen.add((kind, call.tile))
                row = {"kernel": kind, "sm": capability, "heads": heads, "tile": asdict(call.tile)}
                yield row | compile_call(call, capability)


if __name__ == "__main__":
    for row in report(tuple(int(a) for a in sys.argv[1:]) or (80, 90, 100)):
        print(json.dumps(row), flush=True)
