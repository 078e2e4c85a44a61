"""What fits: weights, KV pool, blocks, requests, and how fast memory bandwidth lets them decode."""

from __future__ import annotations

from dataclasses import dataclass

from . import gpus
from .cache_spec import KVCacheSpec
from .formats import BITS, dtype_name, kv_formats, usual_block_size
from .gpus import GPU
from .model_shapes import ModelShape, model_shape
from .units import format_bytes, format_bytes_decimal, require_int


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The answer of :func:`plan_capacity`; all bytes are per GPU.

    Attributes:
        spec: the part of the KV cache that one GPU holds.
        dtype: dtype of the weights.
        usable_bytes: gpu_memory_utilization of the GPU's memory.
        kv_bytes: what weights and activations leave of it.
        max_model_len: the request length that the figures are for unless another is given, in tokens.
    """

    gpu: GPU
    num_gpus: int
    model: ModelShape
    spec: KVCacheSpec
    dtype: str
    gpu_memory_utilization: float
    usable_bytes: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    max_model_len: int

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return (self.kv_bytes - self.spec.fixed_bytes) // self.spec.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Slots in the pool, one token each."""
        return self.num_blocks * self.spec.block_size

    @property
    def tail_bytes(self) -> int:
        """Bytes that a running request takes beside its blocks: its unfinished block, where the format needs that."""
        return self.spec.bytes_for_tails(1, self.dtype if BITS[self.dtype] >= 16 else "bfloat16")

    def max_concurrency(self, num_tokens: int | None = None) -> int:
        """Requests of ``num_tokens`` tokens each (``max_model_len`` if None) that the pool holds, sharing nothing."""
        num_tokens = self.max_model_len if num_tokens is None else require_int("num_tokens", num_tokens, 1)
        if not self.tail_bytes:
            return self.num_blocks // self.spec.blocks_for(num_tokens)
        return (self.kv_bytes - self.spec.fixed_bytes) // (self.spec.bytes_for_request(num_tokens) + self.tail_bytes)

    def decode_step_seconds(self, batch_size: int, num_tokens: int | None = None) -> float:
        """No decode step of ``batch_size`` requests, each with ``num_tokens`` in the cache, is faster than this.

        The larger of the time to read weights and KV once at peak bandwidth, and the time of 2 FLOPs a parameter and
        token at the 16-bit rate (so a bound for arithmetic in 16 bit; attention's own FLOPs are left out).
        """
        require_int("batch_size", batch_size, 1)
        num_tokens = self.max_model_len if num_tokens is None else require_int("num_tokens", num_tokens, 1)
        weights_bytes = self.model.num_params_used(batch_size, self.num_gpus) * BITS[self.dtype] // 8
        kv_bytes = batch_size * num_tokens * self.spec.bytes_per_token
        flops = 2 * batch_size * self.model.num_params_used(1, self.num_gpus)
        return max(memory_bound_seconds(self.gpu, weights_bytes, kv_bytes), flops / self.gpu.flops_16bit)

    def decode_tokens_per_second(self, num_tokens: int | None = None) -> float:
        """Upper bound of decode throughput with the pool full of requests of ``num_tokens``; 0 if none fits."""
        batch_size = self.max_concurrency(num_tokens)
        return batch_size / self.decode_step_seconds(batch_size, num_tokens) if batch_size else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (label, value) pairs: the arithmetic from memory to requests, line by line."""
        spec, batch = self.spec, self.max_concurrency()
        per_gpu = "" if self.num_gpus == 1 else ", each GPU"
        rows = [
            ("GPU", f"{self.num_gpus} x {self.gpu}" if self.num_gpus > 1 else str(self.gpu)),
            ("model", f"{self.model.name}: {self.model.num_params:,} parameters, {self.model.attention}"),
            (f"usable memory{per_gpu}", f"{_both(self.usable_bytes)} = {self.gpu_memory_utilization:g} of the GPU"),
            (f"- weights{per_gpu}", f"{_both(self.weights_bytes)} in {self.dtype}"),
            (f"- activations{per_gpu}", _both(self.activation_bytes) if self.activation_bytes else "not counted"),
            (f"= KV pool{per_gpu}", _both(self.kv_bytes)),
            ("K format", str(spec.layers[0].key)),
            ("V format", str(spec.layers[0].value)),
            (f"KV per token{per_gpu}", f"{spec.bytes_per_token:,} B = {format_bytes(spec.bytes_per_token)}"),
            ("blocks", f"{self.num_blocks:,} of {spec.block_size} tokens ({format_bytes(spec.bytes_per_block)} each)"),
            *([("16-bit tail per request", format_bytes(self.tail_bytes))] if self.tail_bytes else []),
            ("tokens in the pool", f"{self.num_tokens:,}"),
            (f"requests of {self.max_model_len:,} tokens", f"{batch:,}" if batch else "0: not even one fits"),
        ]
        if batch:
            step, rate = self.decode_step_seconds(batch), self.decode_tokens_per_second()
            rows.append(("decode step of those, at least", f"{step * 1e3:.1f} ms"))
            rows.append(("decode throughput, at most", f"{rate:,.0f} tokens/s"))
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(
            f'<tr><th style="text-align:left">{escape(label)}</th><td style="text-align:left">{escape(value)}</td></tr>'
            for label, value in self.rows()
        )
        return f"<table>{cells}</table>"


def plan_capacity(
    gpu: str | GPU,
    model: str | ModelShape,
    *,
    dtype: object = "auto",
    kv_dtype: object = "auto",
    value_dtype: object = None,
    block_size: int | None = None,
    gpu_memory_utilization: float = 0.9,
    activation_bytes: int = 0,
    max_model_len: int | None = None,
    num_gpus: int = 1,
) -> CapacityPlan:
    """Compute what a GPU, or several under tensor parallelism, can hold of a model's requests.

    Args:
        gpu: a name that :func:`~labkit.kv_math.gpu` knows, or a GPU.
        model: a name that :func:`model_shape` knows, or a ModelShape.
        dtype: of the weights; "auto" is bfloat16, or float16 on a GPU without bfloat16.
        kv_dtype: of the cache, a name or KVFormat; "auto" is that of the weights.
        value_dtype: that of V, if it differs from ``kv_dtype``.
        block_size: tokens in a block; None is 16, or 32 for formats where tokens of a block share scales.
        activation_bytes: peak of everything that is neither weights nor cache, on each GPU; 0 leaves it out.
        max_model_len: tokens of a full-length request; the model's own limit if None.

    Raises ValueError if the weights do not fit (naming both numbers), a format the GPU cannot run (fp8 needs sm_89,
    bfloat16 sm_80), an unknown name, or a value out of range.
    """
    the_gpu = gpu if isinstance(gpu, GPU) else gpus.gpu(gpu)
    shape = model if isinstance(model, ModelShape) else model_shape(model)
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}")
    require_int("activation_bytes", activation_bytes, 0)
    max_model_len = shape.max_model_len if max_model_len is None else require_int("max_model_len", max_model_len, 1)

    weights_dtype = dtype_name(("bfloat16" if the_gpu.supports_bf16 else "float16") if dtype == "auto" else dtype)
    if kv_dtype == "auto":
        if BITS[weights_dtype] < 16:
            raise ValueError(
                f"kv_dtype must be given when the weights are {weights_dtype}: which format has the cache?"
            )
        kv_dtype = weights_dtype
    if block_size is None:
        block_size = usual_block_size(kv_formats(kv_dtype, value_dtype))
    spec = shape.kv_spec(kv_dtype, block_size, value_dtype=value_dtype, num_gpus=num_gpus)
    _require_support(the_gpu, "dtype", weights_dtype)
    _require_support(the_gpu, "kv_dtype", spec.layers[0].key.dtype)
    _require_support(the_gpu, "value_dtype", spec.layers[0].value.dtype)

    usable_bytes = int(the_gpu.memory_bytes * gpu_memory_utilization)
    weights_bytes = shape.weights_bytes(weights_dtype, num_gpus)
    kv_bytes = usable_bytes - weights_bytes - activation_bytes
    if kv_bytes < spec.bytes_for_pool(1):
        raise ValueError(
            f"{shape.name} does not fit {the_gpu.name}: weights {format_bytes(weights_bytes)} + activations "
            f"{format_bytes(activation_bytes)} + one KV block {format_bytes(spec.bytes_per_block)} on each of "
            f"{num_gpus} GPU(s) > {format_bytes(usable_bytes)}, which is gpu_memory_utilization "
            f"{gpu_memory_utilization:g} of {format_bytes(the_gpu.memory_bytes)}. "
            "Use more GPUs (num_gpus), a smaller dtype or another GPU"
        )
    return CapacityPlan(
        the_gpu,
        num_gpus,
        shape,
        spec,
        weights_dtype,
        gpu_memory_utilization,
        usable_bytes,
        weights_bytes,
        activation_bytes,
        kv_bytes,
        max_model_len,
    )


def memory_bound_seconds(gpu: GPU, weights_bytes: int, kv_bytes: int) -> float:
    """Seconds to read weights and KV cache once at peak bandwidth: the floor of a decode step's time.

    Source: Williams et al., Roofline (CACM 2009), applied where arithmetic is free.
    """
    return (weights_bytes + kv_bytes) / gpu.bandwidth


def _require_support(on: GPU, argument: str, dtype: str) -> None:
    major, minor = on.compute_capability
    if dtype.startswith("fp8") and not on.supports_fp8:
        raise ValueError(f"{argument}={dtype!r} needs sm_89 or newer, {on.name} is sm_{major}{minor}: use int8")
    if dtype == "bfloat16" and not on.supports_bf16:
        raise ValueError(f"{argument}='bfloat16' needs sm_80 or newer, {on.name} is sm_{major}{minor}: use float16")


def _both(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({format_bytes_decimal(num_bytes)})"
