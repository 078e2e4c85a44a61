"""One rung of the combined experiment on this machine: the model, an engine full of requests, a steady window."""

from __future__ import annotations

import gc

import torch
from transformers import PreTrainedModel

from labkit.engine import LLM
from labkit.engine.kv_storage import KVStorage
from labkit.kv_math import GIB
from labkit.models import convert_kv_heads, embedded, load_model, random_model
from labkit.scheduling import SamplingParams

from .combined_rungs import Rung
from .combined_setting import GPU_MEMORY_UTILIZATION, Setting, serve_window
from .recorded import results
from .result_file import Row

_POLICIES = {
    "auto": "unquantised",
    "int8": "int8 per token-head",
    "int4": "int4 K per channel, V per token",
}  # in data/results/quality.json


class ModelSource:
    """The models of a setting, one at a time on the device."""

    def __init__(self, setting: Setting) -> None:
        self.is_real = setting.shape.name == embedded.NAME
        self._setting = setting
        self._num_kv_heads = 0
        self._model: PreTrainedModel | None = None

    def model(self, rung: Rung) -> PreTrainedModel:
        """The model with the rung's KV heads; of the embedded one copies of its heads, which change no logit."""
        shape = self._setting.shape_of(rung)
        if shape.num_kv_heads != self._num_kv_heads or self._model is None:
            self._model = None  # its memory goes before the next takes any
            gc.collect()
            if self._setting.device == "cuda":
                torch.cuda.empty_cache()
            self._num_kv_heads = shape.num_kv_heads
            if self.is_real:
                model, _ = load_model(dtype=self._setting.dtype, device="cpu")
                self._model = convert_kv_heads(model, shape.num_kv_heads, method="repeat")[0]
            else:
                self._model = random_model(shape, dtype=self._setting.dtype, device=self._setting.device)
        return self._model


def measured(model: PreTrainedModel, setting: Setting, rung: Rung, row: Row, window: float, ramp: float) -> Row:
    """The figures of one rung: at least ``window`` seconds in a steady state, after ``ramp`` seconds."""
    limits = setting.limits(rung, row["lengths"])
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with LLM(
        model,
        max_model_len=setting.context,
        block_size=rung.block_size,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        enable_prefix_caching=rung.shares_prefix,
        kv_cache_dtype=rung.kv_cache_dtype,
        memory_limit=setting.memory_limit,
        kv_allocator=rung.kv_allocator,
        scheduler=rung.scheduler,
    ) as llm:
        llm.engine.trace = None
        _warm_up(llm, row["predicted_concurrency"])
        fill_with_noise(llm)
        who = setting.traffic(rung, row["lengths"])
        figures = serve_window(llm.engine, who, row["predicted_concurrency"], window, ramp)
        memory = llm.memory
        figures["bytes_per_request"] = figures.pop("blocks_per_request") * memory.block_size * memory.bytes_per_token
        figures |= {
            "num_blocks": memory.num_blocks,
            "bytes_per_token": memory.bytes_per_token,
            "weights_bytes": memory.weights,
            "set_aside_bytes": memory.activations + memory.graphs + memory.kv_tails,
        }
        if model.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_reserved() / GIB
    return figures


def _warm_up(llm: LLM, concurrency: int) -> None:
    """Serve as many requests as will run, so that no window waits for a kernel to be compiled.

    Their prompts take one and a half steps: those of the first decode beside the prompts of the second.
    """
    config = llm.engine.scheduler.config
    count = min(concurrency, config.max_num_seqs)
    length = min(3 * config.max_num_batched_tokens // (2 * count) + 1, llm.max_model_len - 4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[1] * length] * count, params, use_tqdm=False)
    llm.reset_prefix_cache()


@torch.inference_mode()
def fill_with_noise(llm: LLM) -> None:
    """Random K and V everywhere, so that nothing is faster than it would be with real ones."""
    storage: KVStorage = llm.engine.executor.storage  # type: ignore[attr-defined]
    for tensor in (*storage.tensors(), *storage.tails):
        if tensor.is_floating_point():
            tensor.uniform_(-1, 1)
        else:
            tensor.random_()


def recorded_quality_of(rung: Rung) -> Row:
    """What the rung's KV format costs the embedded model in perplexity."""
    policy = _POLICIES[rung.kv_cache_dtype]
    found = next((row for row in results("quality.json").get("rows", []) if row["policy"] == policy), None)
    return {"delta_ppl_percent": None if found is None else found["delta_ppl_percent"]}
