"""What the claims leave to be measured and no other experiment measures: on the GPU that is there.

Each function returns rows {"claim", "quantity", "setting", "value", "unit"}. ``python -m labkit.experiments.claims``
runs them all; with ``--shape llama-2-13b`` on a GPU of 80 GB or more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, PreTrainedModel, StaticCache

from labkit.engine import LLM
from labkit.kv_math import GIB, ModelShape

from ..engine_figures import decode_breakdown
from ..predict_run import occupancy
from ..serving import run_requests
from ..serving_workload import standard_workload

Row = dict[str, Any]


def _row(claim: str, quantity: str, setting: str, value: float, unit: str) -> Row:
    return {"claim": claim, "quantity": quantity, "setting": setting, "value": float(f"{value:.9g}"), "unit": unit}


def decode_steps(model: PreTrainedModel, bytes_per_second: float, *, context: int = 1024) -> list[Row]:
    """A1 and A34: milliseconds of a decode step against tokens in flight; tokens/s as a share of what bytes allow."""
    rows = []
    with LLM(model, max_model_len=context + 64, enable_prefix_caching=False) as llm:
        most = llm.memory.num_blocks * llm.memory.block_size // (context + 64)
        batches = [batch for batch in (1, 8, 16, 32, 64, 128) if batch <= most]
        for step in decode_breakdown(llm, batches, context, bytes_per_second):
            setting = f"batch {step['batch']} x {context} tokens"
            rate = 1e3 * step["batch"] / step["step_ms"]
            rows += [
                _row("A1", "decode step", setting, step["step_ms"], "ms"),
                _row("A34", "decode throughput", setting, rate, "tokens/s"),
                _row("A34", "share of the bandwidth bound", setting, 100 / step["step_over_floor"], "%"),
            ]
    return rows


def pool_allocation(shape: ModelShape, num_tokens: int, device: torch.device) -> list[Row]:
    """A6: what the allocator of torch hands out for K and V of ``num_tokens`` tokens, layer by layer."""
    before = torch.cuda.memory_allocated(device)
    size = (2, num_tokens, shape.num_kv_heads, shape.head_dim)
    pool = [torch.empty(size, dtype=torch.float16, device=device) for _ in range(shape.num_layers)]
    taken = torch.cuda.memory_allocated(device) - before
    del pool
    torch.cuda.empty_cache()
    return [_row("A6", "KV cache allocated", f"{shape.name}, {num_tokens} tokens, fp16", taken / GIB, "GiB")]


@torch.inference_mode()
def cache_peaks(model: PreTrainedModel, prompt_lens: Sequence[int], num_output_tokens: int) -> list[Row]:
    """A8: peak memory above the weights of one batch, in transformers' two caches and in blocks of 16.

    transformers pads all prompts to the longest; StaticCache reserves the model's longest context.
    """
    device, config = model.device, cast(Any, model.config.get_text_config())
    batch, longest = len(prompt_lens), max(prompt_lens)
    setting = f"{batch} requests, {min(prompt_lens)} to {longest} + {num_output_tokens} tokens"
    tokens = torch.ones(batch, longest, dtype=torch.int64, device=device)
    mask = torch.stack([torch.arange(longest, device=device) >= longest - length for length in prompt_lens]).long()

    def generate(cache: Any) -> None:
        forced: dict[str, Any] = dict(
            max_new_tokens=num_output_tokens, min_new_tokens=num_output_tokens, do_sample=False, pad_token_id=0
        )
        forced["disable_compile"] = True  # else StaticCache has the model compiled, for minutes
        cast(Any, model).generate(tokens, attention_mask=mask, past_key_values=cache, **forced)

    rows = []
    for name, make in (
        ("StaticCache", lambda: StaticCache(config, max_cache_len=config.max_position_embeddings)),
        ("DynamicCache", lambda: DynamicCache(config=config)),
    ):
        peak = _peak(device, lambda make=make: generate(make()))
        rows.append(_row("A8", f"peak memory, {name}", setting, peak / GIB, "GiB"))
    blocks = sum(-(-(length + num_output_tokens) // 16) for length in prompt_lens)
    kv_bytes = blocks * 16 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return [*rows, _row("A8", "KV in blocks of 16", setting, kv_bytes * model.dtype.itemsize / GIB, "GiB")]


def joined_against_paged(num_heads: int, head_dim: int, batch: int, context: int, device: torch.device) -> list[Row]:
    """A19: one decode step of one layer, the paged kernel against joining the blocks first and then SDPA."""
    from labkit.kernels import KVPages, Workspace, paged_attention

    per_seq = context // 16
    half: dict[str, Any] = dict(dtype=torch.float16, device=device)
    pages = KVPages(*(torch.randn(batch * per_seq, num_heads, 16, head_dim, **half) for _ in range(2)))
    table = torch.randperm(batch * per_seq, device=device).view(batch, per_seq).int()
    q = torch.randn(batch, num_heads, head_dim, **half)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    workspace, scale = Workspace.allocate(head_dim, device), head_dim**-0.5

    def paged() -> torch.Tensor:
        return paged_attention(q, pages, table, lens, starts, scale=scale, max_query_len=1, workspace=workspace)

    def joined() -> torch.Tensor:
        k, v = (page[table.long()].transpose(1, 2).reshape(batch, num_heads, context, head_dim) for page in pages)
        return scaled_dot_product_attention(q[:, :, None], k, v, scale=scale)[:, :, 0]

    torch.testing.assert_close(paged(), joined(), atol=2e-3, rtol=2e-2)
    setting = f"{batch} x {context} tokens, {num_heads} heads of {head_dim}, fp16"
    rows = []
    for name, call in (("blocks read in place", paged), ("blocks joined, then SDPA", joined)):
        rows.append(_row("A19", f"decode step, {name}", setting, 1e6 * _seconds(call, device), "us"))
        rows.append(_row("A19", f"scratch memory, {name}", setting, _peak(device, call) / 1e6, "MB"))
    return rows


def activation_peaks(model: PreTrainedModel, budgets: Sequence[int]) -> list[Row]:
    """A28: what the largest step takes beside weights and cache, by token budget."""
    rows = []
    for budget in budgets:
        with LLM(model, max_num_batched_tokens=budget, num_gpu_blocks_override=1024, enforce_eager=True) as llm:
            peak = llm.memory.activations / GIB
        rows.append(_row("A28", "peak of activations", f"max_num_batched_tokens {budget}", peak, "GiB"))
    return rows


def kv_share(model: PreTrainedModel, batches: Sequence[int] = (1, 16, 64)) -> list[Row]:
    """B11: how much of weights and live KV together is KV, over a run of the first requests of the standard workload.

    Of each batch, all there at once: the average over steps, and the most.
    """
    rows = []
    for batch in batches:
        requests = standard_workload(model.config.vocab_size)[:batch]
        longest = max(len(request.prompt_token_ids) + request.num_output_tokens for request in requests)
        with LLM(model, max_model_len=longest, enable_prefix_caching=False) as llm:
            run_requests(llm, requests)
            tokens = occupancy(cast(Any, llm.trace), "run")["live tokens"].to_numpy(np.float64)
            live = tokens * llm.memory.bytes_per_token
            share = 100 * live / (live + llm.memory.weights)
        for name, value in (("average", share.mean()), ("most", share.max())):
            rows.append(_row("B11", f"KV / (KV + weights), {name}", f"{batch} requests at once", value, "%"))
    return rows


def attention_flops(num_heads: int = 64, head_dim: int = 128, num_tokens: int = 128) -> list[Row]:
    """B24: FLOPs of scores and values by torch's counter, for 64, 8 and 1 KV heads; no GPU needed."""
    rows = []
    for kv_heads in (num_heads, num_heads // 8, 1):
        q = torch.zeros(1, num_heads, num_tokens, head_dim, device="meta")
        kv = torch.zeros(1, kv_heads, num_tokens, head_dim, device="meta").repeat_interleave(num_heads // kv_heads, 1)
        with FlopCounterMode(display=False) as counter:
            torch.matmul(q @ kv.transpose(2, 3), kv)
        setting = f"{num_heads} query heads, {kv_heads} KV heads, {num_tokens} tokens"
        rows.append(_row("B24", "FLOPs of scores and values", setting, counter.get_total_flops(), "FLOP"))
    return rows


def gain_by_spread(spreads: Sequence[float] = (0, 0.25, 0.5, 0.81, 1.0, 1.5), mean: int = 1366) -> list[Row]:
    """B21: how many times more requests fit in blocks of 16 than in reservations of the 99th percentile of lengths."""
    rng = np.random.default_rng(0)
    rows = []
    for spread in spreads:
        sigma = np.sqrt(np.log1p(spread**2))
        lengths = np.maximum(1, rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 100_000)).round()
        gain = np.percentile(lengths, 99) / (np.ceil(lengths / 16) * 16).mean()
        rows.append(_row("B21", "requests in blocks / in reservations", f"sd / mean {spread}", gain, "x"))
    return rows


def _peak(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that ``call`` takes at its peak above what was allocated before it."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    """Median seconds of ``call`` on the device, launches queued behind a pause so that the host does not count."""
    for _ in range(3):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda._sleep(20_000_000)
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return float(np.median([start.elapsed_time(end) for start, end in events])) / 1e3


def timed(rows: Callable[[], list[Row]], name: str, say: Callable[[str], None]) -> list[Row]:
    """``rows()``, with a word about how long it took."""
    start = time.perf_counter()
    measured = rows()
    say(f"{name}: {len(measured)} figures in {time.perf_counter() - start:.1f} s")
    return measured
