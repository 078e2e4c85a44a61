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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .attention import AttentionLaunch, KernelCall, Workspace, decode_tile_for, prefill_tile_for
from .pages import KVPages, QuantisedKVPages, QuantisedPages
from .tuning import DecodeTile, PrefillTile, WriteTile
from .write_quantised import write_launch, write_quantised_kv_kernel

POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
    torch.int64: "*i64", torch.int8: "*i8", torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip
HEADS = [  # query heads, KV heads, head_dim_k, head_dim_v: each row of the tables, MHA and GQA, and a padded size
    (32, 32, 128, 128),
    (32, 8, 128, 128),
    (32, 1, 128, 128),
    (9, 3, 64, 64),
    (32, 32, 80, 80),
    (16, 16, 192, 128),
    (8, 4, 256, 256),
]
KV_FORMATS = ("fp8", "int8", "int4")
QUANTISED_HEADS = [(32, 32, 128, 128), (32, 8, 128, 128), (9, 3, 64, 64), (8, 4, 256, 256)]
MOST_SCALES = "int8 fixed channels"  # read, never written: the format whose scales could take the most shared memory


def example_pages(
    kv_format: str, num_blocks: int, heads: tuple[int, int, int, int], block_size: int, **where: Any
) -> KVPages | QuantisedKVPages:
    """Pages without contents, in the layout that a name stands for: "bf16", one of KV_FORMATS (labkit.kv_math) or
    MOST_SCALES.

    where: keywords of torch.empty (device). int4 has a tail of 256 rows.
    """
    _, num_kv_heads, dim_k, dim_v = heads
    shape = (num_blocks, num_kv_heads, block_size)

    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, **where)

    def pages(dim: int, dtype: torch.dtype, *scale_shape: int, like: torch.dtype = torch.float32) -> QuantisedPages:
        packed, scales = dim // 2 if dtype == torch.uint8 else dim, empty(*scale_shape, dtype=like)
        zero_points = empty(*scale_shape, dtype=like) if dtype == torch.uint8 else None
        return QuantisedPages(empty(*shape, packed, dtype=dtype), scales, zero_points)

    def fixed(dim: int) -> QuantisedPages:
        scales, zero_points = (empty(1, num_kv_heads, 1, dim, dtype=torch.float32) for _ in range(2))
        return QuantisedPages(empty(*shape, dim, dtype=torch.uint8), scales, zero_points)

    if kv_format == "bf16":
        return KVPages(empty(*shape, dim_k, dtype=torch.bfloat16), empty(*shape, dim_v, dtype=torch.bfloat16))
    if kv_format == "fp8":  # one scale a layer
        k, v = (pages(dim, torch.float8_e4m3fn, 1, 1, 1, 1) for dim in (dim_k, dim_v))
        return QuantisedKVPages(k, v, dim_k, dim_v)
    if kv_format == "int8":  # one a token and head
        k, v = (pages(dim, torch.int8, *shape, 1) for dim in (dim_k, dim_v))
        return QuantisedKVPages(k, v, dim_k, dim_v)
    if kv_format == MOST_SCALES:  # a scale and a zero point a channel
        return QuantisedKVPages(fixed(dim_k), fixed(dim_v), dim_k, dim_v)
    if kv_format != "int4":
        raise ValueError(f"kv_format must be bf16, {', '.join(KV_FORMATS)} or {MOST_SCALES}, got {kv_format!r}")
    k = pages(dim_k, torch.uint8, num_blocks, num_kv_heads, 1, dim_k, like=torch.float16)  # one a channel and block
    v = pages(dim_v, torch.uint8, *shape, 1, like=torch.float16)
    return QuantisedKVPages(k, v, dim_k, dim_v, empty(256, *shape[1:], dim_k, dtype=torch.bfloat16))


def example_call(
    kind: str,
    capability: int,
    heads: tuple[int, int, int, int],
    tile: DecodeTile | PrefillTile | None = None,
    pairs_per_sm: float = 0,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_format: str = "bf16",
) -> KernelCall:
    """The call `paged_attention` would make for these heads, or the one with `tile`, on tensors without memory."""
    num_q_heads, num_kv_heads, dim_k, dim_v = heads
    meta = dict(device="meta")
    kv = example_pages(kv_format, 64, heads, block_size, **meta)
    if isinstance(kv, KVPages):
        kv = KVPages(*(pages.to(dtype) for pages in kv))
    q = torch.empty(32, num_q_heads, dim_k, dtype=dtype, **meta)
    out = torch.empty(32, num_q_heads, dim_v, dtype=dtype, **meta)
    table, lens, starts, tails = (torch.empty(s, dtype=torch.int32, **meta) for s in ((32, 64), (32,), (33,), (32,)))
    dk, dv, group = triton.next_power_of_2(dim_k), triton.next_power_of_2(dim_v), num_q_heads // num_kv_heads
    launch = AttentionLaunch(q, kv, table, lens, starts, out, dim_k**-0.5, None, None, None, group, dk, dv, tails)
    decode = decode_tile_for(kv, capability, group, max(dim_k, dim_v), pairs_per_sm, dtype.itemsize)
    if kind == "decode":
        call = launch.decode(tile or decode, Workspace.with_capacity(4096, dv, torch.device("meta")), 1, 1)
        return replace(call, constants=call.constants | {"EARLY": capability >= 90})
    tile = tile or prefill_tile_for(kv, capability, group, max(dim_k, dim_v), dtype.itemsize)
    return launch.prefill(tile, decode.block_m)


def example_write(
    kv_format: str, tile: WriteTile | None = None, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """(kernel, arguments, constants, options) of `write_quantised_kv` for the first of QUANTISED_HEADS; no memory.

    dtype: of new K and V. tile None is the shipped one.
    """
    block_size = 32 if kv_format == "int4" else 16
    kv = example_pages(kv_format, 64, QUANTISED_HEADS[0], block_size, device="meta")
    assert isinstance(kv, QuantisedKVPages)
    if kv.k_tail is not None:
        kv = kv._replace(k_tail=kv.k_tail.to(dtype))
    new = torch.empty(256, kv.num_kv_heads, kv.head_dim_k, dtype=dtype, device="meta")
    slots, numbers = (torch.empty(256, dtype=dtype, device="meta") for dtype in (torch.int64, torch.int32))
    _, arguments, constants, options = write_launch(new, new, kv, slots, numbers, numbers, numbers, tile)
    return write_quantised_kv_kernel, arguments, constants, options


def compile_kernel(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], options: dict[str, Any], capability: int
) -> dict[str, Any]:
    """Compile for a compute capability such as 90; {registers, spill_bytes, shared_bytes, wgmma, mma}."""
    baked: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(value: Any, path: tuple[int, ...]) -> Any:
        """Triton's name for the type of an argument; constants and alignment noted on the way, as at launch."""
        if isinstance(value, tuple):
            return type(value)(*(type_of(part, (*path, i)) for i, part in enumerate(value)))
        if value is None or (isinstance(value, int) and value == 1):  # a stride of 1 is baked in
            baked[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if isinstance(value, int):
            if value % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return "i32"
        return "fp32"

    signature = {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            baked[(i,)] = constants[name]
            signature[name] = "constexpr"
        else:
            signature[name] = type_of(arguments[i], (i,))
    source = ASTSource(fn=kernel, signature=signature, constexprs=baked, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
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


def report(capabilities: tuple[int, ...] = (80, 89, 90, 100)) -> Iterator[dict[str, Any]]:
    for capability in capabilities:
        jobs = [("decode", heads, "bf16", 16, pairs_per_sm) for heads in HEADS for pairs_per_sm in (0, 1, 64)]
        jobs += [("prefill", heads, "bf16", 16, 0) for heads in HEADS]
        jobs += [
            (kind, heads, kv_format, 32 if kv_format == "int4" else 16, 0)
            for kind, some_heads in (("decode", QUANTISED_HEADS), ("prefill", QUANTISED_HEADS[1:]))
            for kv_format in KV_FORMATS
            if kv_format != "fp8" or capability >= 89
            for heads in some_heads
        ]
        jobs.append(("prefill", QUANTISED_HEADS[-1], MOST_SCALES, 16, 0))
        seen = set()
        for kind, heads, kv_format, block_size, pairs_per_sm in jobs:
            call = example_call(
                kind, capability, heads, pairs_per_sm=pairs_per_sm, block_size=block_size, kv_format=kv_format
            )
            if (kind, heads, kv_format, call.tile) in seen:
                continue
            seen.add((kind, heads, kv_format, call.tile))
            row = {"kernel": kind, "sm": capability, "heads": heads, "kv_format": kv_format, "tile": asdict(call.tile)}
            yield row | compile_kernel(call.kernel, call.arguments, call.constants, call.options(), capability)
        writes = [(kv_format, kv_format, torch.bfloat16) for kv_format in KV_FORMATS]
        for name, kv_format, dtype in (*writes, ("int4 of float32", "int4", torch.float32)):
            if kv_format != "fp8" or capability >= 89:
                kernel, arguments, constants, options = example_write(kv_format, dtype=dtype)
                heads = QUANTISED_HEADS[0]
                tile = {"block_m": constants["HEADS"], "block_n": heads[2], **options}  # heads x channels
                row = {"kernel": "write", "sm": capability, "heads": heads, "kv_format": name, "tile": tile}
                early = {"EARLY": capability >= 90}
                yield row | compile_kernel(kernel, arguments, constants | early, options, capability)


if __name__ == "__main__":
    for row in report(tuple(int(a) for a in sys.argv[1:]) or (80, 89, 90, 100)):
        print(json.dumps(row), flush=True)
