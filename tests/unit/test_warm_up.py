"""No request waits for a compiler: the kernels that serving needs have all been compiled when an engine stands.

What Triton compiles anew is reckoned here by its rules (types, alignment of pointers, integers that are 1 or multiples
of 16, constants), on the launches that an H200 would see; nothing is computed.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit.engine import LLM
from labkit.engine.warm_up import batches_to_compile
from labkit.kernels import attention, elementwise
from labkit.models import fused
from labkit.scheduling import SamplingParams

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="looks at launches instead of a GPU")
H200 = (90, 132)  # compute capability, multiprocessors
MAX_NUM_SEQS = 70


def of_argument(value: Any, specialised: bool = True) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(of_argument(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int, value >= 1 << 31, specialised and (value == 1, value % 16 == 0)
    return type(value)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What the launches so far have compiled, each kernel once for each of its variants."""
    seen: set[Any] = set()

    def launch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters
        unspecialised = kernel.kwargs.get("do_not_specialize") or ()
        given = dict(zip(parameters, arguments, strict=False)) | named
        described = {
            name: value
            if name not in parameters or "constexpr" in str(parameters[name].annotation)
            else of_argument(value, name not in unspecialised)
            for name, value in given.items()
        }
        seen.add((kernel.fn.__name__, str(described)))

    monkeypatch.setattr(type(attention.decode_kernel), "run", launch)
    monkeypatch.setattr(attention, "device_limits", lambda device: H200)
    monkeypatch.setattr(fused, "elementwise_ops", lambda device: elementwise)
    return seen


def model(num_kv_heads: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=num_kv_heads,
        head_dim=128,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("num_kv_heads", [32, 8, 1])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4", "fp8"])
def test_serving_compiles_nothing(kv_cache_dtype: str, num_kv_heads: int, compiled: set[Any]) -> None:
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 128}
    options = {"attention_backend": "triton", "kv_cache_dtype": kv_cache_dtype}
    with LLM(model(num_kv_heads), enable_prefix_caching=False, **options, **sizes) as llm, torch.inference_mode():
        for query_lens in batches_to_compile(MAX_NUM_SEQS, captures_graphs=False):
            llm.engine.executor.warm_up(query_lens)  # type: ignore[attr-defined]
        at_start = set(compiled)
        assert {name for name, _ in at_start} >= {"decode_kernel", "prefill_kernel", "rms_norm_kernel"}
        # Prompts of all lengths join in turn, so that a batch has had every number of sequences by the end.
        prompts = [[1] * (1 + i * 7 % 40) for i in range(2 * MAX_NUM_SEQS)]
        params = [SamplingParams(temperature=0, max_tokens=2 + i % 23, ignore_eos=True) for i in range(len(prompts))]
        llm.generate(prompts, params, use_tqdm=False)
    # On a GPU a step without prompts runs in the next larger graph; here it may be of a size that no graph has.
    later = {(name, how) for name, how in compiled - at_start if "'MULTI_QUERY': False" not in how}
    assert not later
