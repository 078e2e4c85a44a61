"""Putting an engine together: load the model, size the pool, wire the parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from labkit.core import Engine
from labkit.kv_math import KVCacheSpec, usual_block_size
from labkit.memory import (
    ContiguousKVManager,
    KVAllocator,
    KVCacheManager,
    reservation_named,
)
from labkit.models import RandomWeights, load_model, random_model, require_supported
from labkit.observe import Trace
from labkit.quant import KVPolicy
from labkit.scheduling import Scheduler, SchedulerConfig

from .attention import attach, detach
from .backends import load_backend
from .device_memory import GIB, cap_memory, engine_does_not_fit, weights_do_not_fit
from .fused_model import FusedModel
from .host_blocks import HostBlocks
from .kv_policy import read_scales, require_support, resolve_policy
from .kv_storage import KVStorage, LayerShape, cache_spec, record_layer_shapes
from .measured_cost import measure_preemption_cost
from .memory_plan import MemoryPlan, plan_memory
from .model_executor import ModelExecutor
from .options import SCHEDULERS, EngineOptions
from .warm_up import compile_kernels

if TYPE_CHECKING:
    from .tensor_parallel.shard_group import ShardGroup


def resolve_model(
    model: str | Path | PreTrainedModel | RandomWeights | None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    quantization: str | None,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load what was named, or take the module that was passed. Raises ValueError for what cannot be served."""
    chosen = _checked_device(device)
    if isinstance(model, RandomWeights):
        model = random_model(model.shape, dtype=model.dtype, device=chosen, seed=model.seed)
    if isinstance(model, torch.nn.Module):
        if isinstance(tokenizer, str | Path):
            raise ValueError(f"with a module as model, tokenizer must be a tokenizer object or None, got {tokenizer!r}")
        if dtype not in ("auto", model.dtype):
            raise ValueError(f"dtype must be 'auto' with a module as model (it is {model.dtype}), got {dtype!r}")
        if quantization is not None:
            raise ValueError(
                f"quantization must be None with a module as model, got {quantization!r}: change its weights yourself, "
                "labkit.models.quantise_weights(model), or pass the model's name"
            )
        if device is not None and (chosen.type, chosen.index or 0) != (model.device.type, model.device.index or 0):
            raise ValueError(f"the model is on {model.device}, device says {device!r}: move the model first")
        loaded = model.eval(), tokenizer
    else:
        try:
            loaded = load_model(
                model,
                tokenizer=tokenizer,
                dtype=dtype,
                device=chosen,
                quantization=quantization,
                trust_remote_code=trust_remote_code,
            )
        except torch.OutOfMemoryError as error:
            raise weights_do_not_fit(model, chosen) from error
    require_supported(loaded[0])
    return loaded


def _checked_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}") from error


def vocab_size(model: PreTrainedModel) -> int:
    """Token ids that the model has an embedding for."""
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr,index]


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Every token that ends a sequence, by the generation config and by the tokenizer."""
    generation_config = getattr(model, "generation_config", None)
    eos = getattr(generation_config, "eos_token_id", None)
    ids = set(eos) if isinstance(eos, list | tuple) else {eos}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(token_id for token_id in ids if token_id is not None))


@dataclass(slots=True)
class BuiltEngine:
    """The engine and what an :class:`LLM` needs to know of its making."""

    engine: Engine
    executor: ModelExecutor
    storage: KVStorage
    memory: MemoryPlan
    backend_name: str
    fused: FusedModel | None
    host_blocks: HostBlocks | None
    is_capped: bool

    def release(self, model: PreTrainedModel) -> None:
        """Free the pool's tensors and graphs, and give ``model`` its own layers and attention back.

        Of a device that has failed nothing is asked: its memory comes back when the process ends.
        """
        self.executor.reset()
        if self.fused is not None:
            self.fused.undo()
        detach(model)
        if self.executor.has_failed:
            return
        self.executor.graphs = None
        self.storage.release()
        if self.host_blocks is not None:
            self.host_blocks.release()
        if self.is_capped:
            cap_memory(model.device, None)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def build_engine(model: PreTrainedModel, options: EngineOptions, group: ShardGroup | None = None) -> BuiltEngine:
    """Size the pool, allocate it and connect scheduler, allocator and executor.

    ``group`` is given where ``model`` is one rank's shard of a model. On any error the model has its own attention
    again.
    """
    backend_name, backend = load_backend(options.attention_backend, model.device)
    attach(model)
    fused: FusedModel | None = None
    limit = None if options.memory_limit is None else int(options.memory_limit * GIB)
    try:
        if limit is not None:
            cap_memory(model.device, limit)
        shapes = record_layer_shapes(model)
        require_windows_to_arrive(model, shapes)
        if not options.enforce_eager:
            fused = FusedModel(model, None if group is None else group.all_reduce)
        captures_graphs = backend_name == "triton" and model.device.type == "cuda" and not options.enforce_eager
        max_num_batched_tokens = token_budget(options, model.device.type)
        policy = resolve_policy(options.kv_cache_dtype)
        spec = _stored_cache(shapes, policy, options.block_size, model.device)
        memory = plan_memory(
            model,
            spec,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=options.num_gpu_blocks_override,
            gpu_memory_utilization=options.gpu_memory_utilization,
            memory_limit=limit,
            swap_space=int(options.swap_space * GIB),
            kv_tails=spec.bytes_for_tails(options.max_num_seqs, next(iter(shapes.values())).dtype),
            captures_graphs=captures_graphs,
        )
        if group is not None:
            memory = group.agree(memory, spec, options.num_gpu_blocks_override)
        scheduler = make_scheduler(options, memory, spec)  # checks the pool's size
        fixed_scales = read_scales(options.kv_scales, policy)
        if group is not None and fixed_scales is not None:
            fixed_scales = group.own_scales(fixed_scales)
        storage = KVStorage(
            shapes,
            memory.num_blocks,
            memory.block_size,
            model.device,
            policy,
            num_tails=options.max_num_seqs,
            fixed_scales=fixed_scales,
        )
        trace = Trace(
            memory.num_blocks,
            memory.block_size,
            model=model.config.name_or_path or type(model).__name__,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            attention_backend=backend_name,
            kv_cache_dtype="auto" if policy is None else str(policy),
        )
        host_blocks = HostBlocks(storage, memory.num_host_blocks) if memory.num_host_blocks else None
        share_tokens = None if group is None else group.share
        executor = ModelExecutor(model, storage, backend, options.max_num_seqs, host_blocks, share_tokens)
        if backend_name != "torch":
            compile_kernels(executor, options.max_num_seqs, captures_graphs, backend_name, policy)
        if captures_graphs:
            executor.capture_graphs(options.max_num_seqs, -(-memory.max_model_len // memory.block_size))
        if host_blocks is not None:
            scheduler.preemption_cost = measure_preemption_cost(executor, host_blocks, max_num_batched_tokens)
        engine = Engine(scheduler, executor, trace)
    except BaseException as error:
        if fused is not None:
            fused.undo()
        detach(model)
        if limit is not None:
            cap_memory(model.device, None)
        if isinstance(error, torch.OutOfMemoryError):
            raise engine_does_not_fit(model.device, options.gpu_memory_utilization, error) from error
        raise
    return BuiltEngine(engine, executor, storage, memory, backend_name, fused, host_blocks, limit is not None)


def token_budget(options: EngineOptions, device_type: str) -> int:
    """``max_num_batched_tokens``, or what is usual on the device."""
    return options.max_num_batched_tokens or max(options.max_num_seqs, 8192 if device_type == "cuda" else 2048)


def make_scheduler(options: EngineOptions, memory: MemoryPlan, spec: KVCacheSpec) -> Scheduler:
    """The scheduler and its allocator. Raises ValueError if the pool is too small for ``max_model_len``."""
    budget = token_budget(options, torch.device(memory.device).type)
    config = SchedulerConfig(options.max_num_seqs, budget, memory.max_model_len)
    return SCHEDULERS[options.scheduler](config, _make_allocator(options, memory, spec))


def require_windows_to_arrive(model: PreTrainedModel, shapes: dict[int, LayerShape]) -> None:
    """Raise ValueError if the config sets a sliding window that lives in the mask only, which we never see."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        lost = [i for i, kind in enumerate(layer_types) if kind == "sliding_attention" and not shapes[i].sliding_window]
    else:
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        lost = list(shapes) if has_window and not any(shape.sliding_window for shape in shapes.values()) else []
    if lost:
        raise ValueError(
            f"{type(model).__name__} (model_type {config.model_type!r}) is not supported: the sliding window of layers "
            f"{lost} does not reach the attention function, so they would see too much"
        )


def _stored_cache(
    shapes: dict[int, LayerShape], policy: KVPolicy | None, block_size: int | None, device: torch.device
) -> KVCacheSpec:
    """The cache as it will be stored. Raises ValueError for a policy that does not fit model, blocks or GPU."""
    if policy is None:
        return cache_spec(shapes, block_size or usual_block_size(()))
    require_support(policy, device)
    try:
        return cache_spec(shapes, block_size or usual_block_size(policy.all_formats), policy)
    except ValueError as error:
        raise ValueError(f"kv_cache_dtype ({policy}) does not fit: {error}") from error


def _make_allocator(options: EngineOptions, memory: MemoryPlan, spec: KVCacheSpec) -> KVAllocator:
    num_blocks, block_size = memory.num_blocks, memory.block_size
    if options.kv_allocator == "paged":
        return KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=options.enable_prefix_caching,
            num_host_blocks=memory.num_host_blocks,
            shares_partial_blocks=not any(layer.tail_values_per_token for layer in spec.layers),
        )
    reservation = reservation_named(options.kv_allocator, memory.max_model_len)
    return ContiguousKVManager(num_blocks, block_size, reservation)
