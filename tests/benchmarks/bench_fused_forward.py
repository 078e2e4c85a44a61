"""One decode step's forward inside a CUDA graph, attention replaced by a pass-through: eager modules against fused.

    python tests/benchmarks/bench_fused_forward.py --out results.json --models llama-2-7b --systems eager fused

Every row runs the same bf16 model with random weights, from token ids to argmax, in milliseconds a replay (median).

    eager        the modules of transformers
    compile      torch.compile of them, with dynamic shapes
    fused        fuse_decoder_layers; writes K and V too
    fused-late   the same without early launch of the small kernels
    gemms        only the matrix products of the fused model: what is left when every other kernel is free

The floor is weight bytes over the read ceiling measured in the same run.
Not a pytest-benchmark file: it needs a GPU to itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
import triton.language as tl
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig

from labkit.kernels import KVPages, elementwise, rope
from labkit.models import fuse_decoder_layers, random_model
from labkit.models.fused import FusedAttentionInfo

SYSTEMS = ("eager", "compile", "fused", "fused-late", "gemms")
BATCHES = (1, 32, 64, 128, 256)


def pass_through(module, query, key, value, attention_mask, **kwargs):
    """q stands for the attention output: same shape, no work."""
    return query.transpose(1, 2).contiguous(), None


class WritingPassThrough:
    """The fused counterpart: q after rotation, K and V written to pages."""

    def __init__(self, config: LlamaConfig) -> None:
        shape = (32, config.num_key_value_heads, 16, config.hidden_size // config.num_attention_heads)
        self.kv = KVPages(*(torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)))
        self.slots = torch.arange(512, device="cuda")

    def __call__(self, info: FusedAttentionInfo, qkv, cos, sin) -> torch.Tensor:
        q = rope.rope_and_write_kv(qkv, cos, sin, self.kv, self.slots[: qkv.shape[0]], info.num_q_heads)
        return q.flatten(1)


def forward_step(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]
    return torch.argmax(logits, dim=-1), logits


def gemms_step(model: Any, hidden: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    for layer in model.model.layers:
        qkv = F.linear(hidden, layer.qkv_weight)
        hidden.addmm_(qkv[:, : hidden.shape[1]], layer.self_attn.o_proj.weight.t())
        F.linear(hidden, layer.gate_up_weight)
        hidden.addmm_(wide, layer.mlp.down_proj.weight.t())
    return model.lm_head(hidden)


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def milliseconds(run: Callable[[], Any], repeats: int = 25) -> float:
    """Median over windows of 4 runs, each window long enough to hide the launch of the first."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 4)
    return statistics.median(times[3:])


@triton.jit
def read_kernel(x, out, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    total = tl.zeros([SIZE], dtype=tl.int32)
    for i in range(ROUNDS):
        total += tl.load(x + (tl.program_id(0).to(tl.int64) * ROUNDS + i) * SIZE + tl.arange(0, SIZE))
    tl.store(out + tl.program_id(0), tl.sum(total))


def read_ceiling() -> float:
    """Bytes a second of reading 8 GiB once."""
    x = torch.randint(-9, 9, (2**31,), dtype=torch.int32, device="cuda")
    out = torch.empty(2**31 // 2**14, dtype=torch.int32, device="cuda")
    return x.nbytes / milliseconds(lambda: read_kernel[out.shape](x, out, SIZE=2048, ROUNDS=8), 8) * 1e3


@contextmanager
def no_early_launch() -> Iterator[None]:
    """Compile the small kernels to start when the kernel before them has ended, as any other does."""
    early = rope.launch_options
    for module in (rope, elementwise):
        module.launch_options = lambda device: {"EARLY": False}  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for module in (rope, elementwise):
            module.launch_options = early  # pyright: ignore[reportAttributeAccessIssue]


def breakdown(graph: torch.cuda.CUDAGraph, top: int = 14) -> list[dict[str, Any]]:
    """GPU time by kernel of one replay, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        graph.replay()
        torch.cuda.synchronize()
    rows = sorted(prof.key_averages(), key=lambda row: -row.self_device_time_total)[:top]
    return [{"kernel": r.key[:110], "calls": r.count, "us": round(r.self_device_time_total, 1)} for r in rows]


@torch.inference_mode()
def bench_model(name: str, systems: list[str], ceiling: float) -> list[dict[str, Any]]:
    model = random_model(name, dtype=torch.bfloat16, device="cuda")
    config: Any = model.config
    model.set_attn_implementation("pass_through")
    base: Any = model.model
    num_bytes = sum(p.nbytes for p in [*base.layers.parameters(), *model.lm_head.parameters()])
    generator = torch.Generator("cuda").manual_seed(1)
    inputs = {
        batch: tuple(torch.randint(0, high, (batch,), device="cuda", generator=generator) for high in (30_000, 1000))
        for batch in BATCHES
    }
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    logits: dict[tuple[str, int], torch.Tensor] = {}

    def measure(system: str, step: Callable[[int], Any], batches: tuple[int, ...] = BATCHES) -> None:
        for batch in batches:
            graph, out = capture(lambda batch=batch: step(batch))
            ms = milliseconds(graph.replay)
            row = {"model": name, "system": system, "batch": batch, "ms": round(ms, 4)}
            rows[system, batch] = row | {"over_floor": round(ms * 1e-3 * ceiling / num_bytes, 3)}
            if isinstance(out, tuple):
                graph.replay()
                logits[system, batch] = out[1].double()
            if system == "fused" and batch in (1, 64):
                rows[system, batch]["breakdown"] = breakdown(graph)
            print({k: v for k, v in rows[system, batch].items() if k != "breakdown"}, flush=True)
            for line in rows[system, batch].get("breakdown", []):
                print("   ", line, flush=True)
            del graph

    if "eager" in systems:
        measure("eager", lambda batch: forward_step(model, *inputs[batch]))
    if "compile" in systems:
        model.forward = torch.compile(model.forward, dynamic=True)
        start = time.perf_counter()
        measure("compile", lambda batch: forward_step(model, *inputs[batch]), BATCHES[1:])
        rows["compile", BATCHES[1]]["compile_and_bench_s"] = round(time.perf_counter() - start, 1)
        del model.forward
    start = time.perf_counter()
    report = fuse_decoder_layers(model, WritingPassThrough(config))
    torch.cuda.synchronize()
    print(name, report, f"{time.perf_counter() - start:.2f} s to fuse", flush=True)
    if "fused" in systems:
        measure("fused", lambda batch: forward_step(model, *inputs[batch]))
    if "fused-late" in systems:
        with no_early_launch():
            measure("fused-late", lambda batch: forward_step(model, *inputs[batch]))
    for batch in BATCHES:
        if ("eager", batch) in logits and ("fused", batch) in logits:
            eager, ours = logits["eager", batch], logits["fused", batch]
            rows["fused", batch]["logits_difference"] = float((ours - eager).norm() / eager.norm())
    hidden = {b: torch.randn(b, config.hidden_size, device="cuda").bfloat16() * 1e-3 for b in BATCHES}
    wide = {b: torch.randn(b, config.intermediate_size, device="cuda").bfloat16() * 1e-3 for b in BATCHES}
    if "gemms" in systems:
        measure("gemms", lambda batch: gemms_step(model, hidden[batch], wide[batch]))
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["llama-2-7b", "smollm2-135m"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["eager", "fused", "fused-late", "gemms"])
    options = parser.parse_args()
    AttentionInterface.register("pass_through", pass_through)
    ceiling = read_ceiling()
    provenance = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "read_ceiling_gb_s": round(ceiling / 1e9),
    }
    print(provenance, flush=True)
    rows = []
    for name in options.models:
        rows += bench_model(name, options.systems, ceiling)
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1))
    for name in options.models:
        for batch in BATCHES:
            found = {r["system"]: r for r in rows if r["model"] == name and r["batch"] == batch}
            text = "  ".join(f"{s} {r['ms']:.3f} ({r['over_floor']:.2f}x)" for s, r in found.items())
            difference = found.get("fused", {}).get("logits_difference")
            print(f"{name} {batch:4d}: {text}  logits differ by {difference}", flush=True)


if __name__ == "__main__":
    main()
