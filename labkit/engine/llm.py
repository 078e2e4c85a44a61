"""The front door: text or token ids in, :class:`RequestOutput` out. Names and behaviour follow vLLM's ``LLM``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from labkit.core import Engine
from labkit.models import RandomWeights
from labkit.observe import EngineStats, Trace
from labkit.quant import KVPolicy
from labkit.scheduling import SamplingParams

from .attention import is_attached
from .build import BuiltEngine, build_engine, eos_token_ids, resolve_model, vocab_size
from .in_flight import Inbox, RequestsInFlight
from .memory_monitor import MemoryMonitor
from .memory_plan import MemoryPlan
from .options import EngineOptions
from .outputs import RequestOutput
from .prompts import PromptLike, PromptReader
from .request_maker import ParamsLike, RequestMaker
from .tensor_parallel import ShardedEngine, become_rank, build_sharded_engine, resolve_sharded


class LLM:
    """Generates with a Hugging Face model through a paged KV cache.

    ::

        llm = LLM()                                   # the embedded model, or "org/name", a folder, a .gguf, a module
        for output in llm.generate(["Hello, my name is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    ``kv_cache_dtype`` is how K and V are stored: "auto" (as the model computes them), "fp8" (e4m3), "fp8_e5m2", "int8",
    "int4", or a :class:`labkit.quant.KVPolicy` (K and V apart, by layer); ``kv_scales`` is a file of scales for formats
    whose scales are fixed before the run (:func:`labkit.quant.save_scales`). ``block_size`` None is 16, or 32 where
    the tokens of a block share scales, as K's do in "int4": there the newest tokens are read in 16 bit until their
    block is full, so answers can depend on how a prompt was cut into chunks.

    Args that are not vLLM's: ``attention_backend`` ("auto", "torch", "triton", or for comparison "unfused", which
    dequantises, then attends); ``kv_allocator`` ("paged", or for comparison "reserve_max", "reserve_power_of_two",
    "reserve_oracle", "first_fit"); ``scheduler`` ("continuous", or for comparison "static"); ``memory_limit`` (GiB: the
    engine acts as if the device had no more; on a GPU that binds all of torch in this process until :meth:`close`).
    ``swap_space`` is GiB of host memory for preempted sequences.
    ``quantization="fp8"`` rounds the weights, not the KV cache: :mod:`labkit.models.fp8_weights`.

    ``tensor_parallel_size`` N shards the model over N processes, one a GPU (see docs/tensor_parallel.md): ``memory`` is
    then that of one rank, and ``model`` an outline without weights.

    Raises ValueError or TypeError naming the argument, its value and the allowed range; NotImplementedError naming an
    argument whose feature does not exist yet; RuntimeError if the device runs out of memory, saying what to lower.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | RandomWeights | None = None,
        *,
        tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        block_size: int | None = None,
        gpu_memory_utilization: float = 0.9,
        num_gpu_blocks_override: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: str | KVPolicy = "auto",
        kv_scales: str | Path | None = None,
        swap_space: float = 0,
        memory_limit: float | None = None,
        tensor_parallel_size: int = 1,
        quantization: str | None = None,
        enforce_eager: bool = False,
        seed: int = 0,
        attention_backend: str = "auto",
        trust_remote_code: bool = False,
        kv_allocator: str = "paged",
        scheduler: str = "continuous",
    ) -> None:
        options = EngineOptions(
            max_model_len=max_model_len,
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            num_gpu_blocks_override=num_gpu_blocks_override,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_dtype=kv_cache_dtype,
            kv_scales=kv_scales,
            swap_space=swap_space,
            memory_limit=memory_limit,
            tensor_parallel_size=tensor_parallel_size,
            enforce_eager=enforce_eager,
            seed=seed,
            attention_backend=attention_backend,
            kv_allocator=kv_allocator,
            scheduler=scheduler,
        )
        chosen = (model, tokenizer, dtype, device, quantization, trust_remote_code)
        self._built: BuiltEngine | ShardedEngine
        if tensor_parallel_size == 1:
            self.model, self._tokenizer = resolve_model(*chosen)
            self._built = build_engine(self.model, options)
        else:
            become_rank()
            self.model, self._tokenizer, source = resolve_sharded(*chosen, options)
            self._built = build_sharded_engine(self.model, source, options)
        self.engine: Engine = self._built.engine
        self.memory: MemoryPlan = self._built.memory
        self.max_model_len = self.memory.max_model_len
        self._prompts = PromptReader(self._tokenizer, vocab_size(self.model))
        self._in_flight = RequestsInFlight(self.engine, self._tokenizer)
        eos = eos_token_ids(self.model, self._tokenizer)
        self._requests = RequestMaker(self._prompts, self.engine.scheduler, eos, seed, in_use=self._in_flight)
        self._step_outputs = Inbox(wants_partial=True)
        self._closed = False
        # Also when nobody calls close: a model that was passed in gets its own attention back.
        self._release = weakref.finalize(self, self._built.release, self.model)
        self._release.atexit = False

    # ------------------------------------------------------------------ whole calls

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or a list of them; outputs in the order of the prompts.

        All prompts and params are checked before any request is admitted. A request whose step failed (out of
        memory, say) comes back with finish reason "error" and a warning; the others are not affected.
        """
        self._require_open()
        requests = self._requests.make_all(self._prompts.read_all(prompts), sampling_params)
        done: dict[str, RequestOutput] = {}
        num_tokens = 0
        bar = tqdm(total=len(requests), disable=not use_tqdm, desc="Requests", unit="req")
        with bar, closing(self._in_flight.run(requests)) as finished:
            for output in finished:
                done[output.request_id] = output
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                bar.update()
                bar.set_postfix_str(f"{num_tokens / max(bar.format_dict['elapsed'], 1e-9):.1f} tokens/s")
        outputs = [done[request.request_id] for request, _ in requests]
        for output in outputs:
            for completion in output.outputs:
                if completion.finish_reason == "error":
                    warnings.warn(f"request {output.request_id} failed: {completion.stop_reason}", stacklevel=2)
        return outputs

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: ParamsLike = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each in a list.

        ``messages`` is a list of {"role": ..., "content": ...}; ``template_options`` go to the chat template.
        """
        return self.generate(self._prompts.read_chats(messages, template_options), sampling_params, use_tqdm)

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
    ) -> Iterator[RequestOutput]:
        """Like :meth:`generate`, but yields each request's output so far whenever a step changed it.

        Leaving the loop early aborts what has not finished.
        """
        self._require_open()
        requests = self._requests.make_all(self._prompts.read_all(prompts), sampling_params)
        return self._in_flight.stream(requests)

    # ------------------------------------------------------------------ one request, one step

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; :meth:`step` runs it. Smaller ``priority`` first; only equal salts share cached blocks."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {request_id!r}")
        self._require_open()
        read = self._prompts.read(prompt)
        request = self._requests.make_one(request_id, read, params, priority, cache_salt)
        self._in_flight.admit(request, read, self._step_outputs)
        self._requests.count_one()

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs so far of the requests from :meth:`add_request` that changed."""
        self._require_open()
        if self.engine.has_unfinished:
            self._in_flight.advance()
        return self._step_outputs.take()

    def abort(self, request_id: str) -> bool:
        """End a request now; its blocks are free again. False if there is no such unfinished request."""
        return self._in_flight.abort(request_id)

    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has something to do or to return."""
        return self.engine.has_unfinished or len(self._step_outputs) > 0

    # ------------------------------------------------------------------ looking

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def trace(self) -> Trace | None:
        return self.engine.trace

    @property
    def attention_backend(self) -> str:
        """The attention that runs: "torch" or "triton"."""
        return self._built.backend_name

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._tokenizer

    def reset_stats(self) -> None:
        """Start the statistics and the trace anew, after a warm-up say. Raises RuntimeError while requests run."""
        self.engine.restart_records()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests are not affected."""
        self.engine.scheduler.kv.reset_prefix_cache()

    def memory_monitor(self, interval: float = 0.1) -> MemoryMonitor:
        """A monitor of this engine's device; use it as a context manager around what should be watched."""
        self._require_open()
        if isinstance(self._built, ShardedEngine):
            raise NotImplementedError(
                "memory_monitor watches this process, and the model's ranks are others: see .memory"
            )
        storage, graphs = self._built.storage, self._built.executor.graphs
        return MemoryMonitor(
            [*self.model.parameters(), *self.model.buffers()],
            storage.tensors(),
            self.engine.scheduler.kv.usage,
            self.model.device,
            kv_tails=storage.tails,
            graph_bytes=(graphs.reserved_bytes, graphs.allocated_bytes) if graphs else (0, 0),
            interval=interval,
        )

    def close(self) -> None:
        """Abort what runs, release the KV pool and give the model its own attention back. Safe to call twice."""
        if self._closed:
            return
        self._in_flight.abort_all()
        self._closed = True
        self._release()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed: make a new one")
        if not is_attached(self.model):
            raise RuntimeError(
                "the model's attention was replaced (set_attn_implementation) after this LLM was made, so its answers "
                "would be wrong: make a new LLM"
            )
