"""fp8 weights: refused in words where they cannot run. Where they can, a GPU test of the engine looks at them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from labkit import LLM
from labkit.engine.memory_monitor import unique_storage_bytes
from labkit.models import fp8_weights, load_model
from labkit.models.fp8_weights import projections, quantise_weights, require_fp8_weights


@pytest.fixture
def a_gpu(monkeypatch):
    """A device that says of itself what a test wants."""

    def pretend(name: str, capability: tuple[int, int]) -> torch.device:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return torch.device("cuda")

    return pretend


def test_a_cpu_is_refused_by_name_before_anything_is_loaded(tiny_llama):
    with pytest.raises(ValueError, match="would run on the CPU: leave it out, or .* kv_cache_dtype='int8'"):
        load_model("no-such/model", device="cpu", quantization="fp8")
    with pytest.raises(ValueError, match="would run on the CPU"):
        quantise_weights(tiny_llama)


def test_the_engine_passes_the_refusal_on():
    with pytest.raises(ValueError, match="would run on the CPU"):
        LLM(device="cpu", quantization="fp8")


def test_bytes_of_a_wrapped_weight_are_those_inside():
    from torch.testing._internal.two_tensor import TwoTensor

    wrapped = TwoTensor(torch.zeros(4, 8), torch.zeros(4, 8))
    assert unique_storage_bytes([wrapped]) == 2 * 4 * 8 * 4


def test_an_older_gpu_is_refused_by_name(a_gpu):
    with pytest.raises(ValueError, match="NVIDIA A100 is sm_80"):
        require_fp8_weights(a_gpu("NVIDIA A100", (8, 0)), None)


def test_other_dtypes_and_names_are_refused(a_gpu):
    with pytest.raises(ValueError, match="dtype='bfloat16'.*got torch.float16"):
        require_fp8_weights(a_gpu("NVIDIA H200", (9, 0)), torch.float16)
    with pytest.raises(ValueError, match="quantization must be None or 'fp8', got 'awq'"):
        load_model(device="cpu", quantization="awq")


def test_without_torchao_the_extra_is_named(a_gpu, monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(fp8_weights, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'kv-labkit\[fp8\]'"):
        require_fp8_weights(a_gpu("NVIDIA H200", (9, 0)), torch.bfloat16)


def test_all_projections_but_the_head_are_taken(tiny_llama):
    names = projections(tiny_llama)
    assert len(names) == 3 * 7
    assert "model.layers.2.mlp.down_proj" in names and "lm_head" not in names


def test_weights_that_would_stay_as_they_are_are_refused():
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=88, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="multiples of 16, model.layers.0.mlp.gate_proj is 88 x 64"):
        projections(LlamaForCausalLM(config))


@pytest.mark.gpu
def test_on_a_gpu_answers_stay_close_and_bytes_halve():
    from labkit.models import random_model

    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs sm_89")
    model = random_model(LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, vocab_size=512))
    tokens = torch.randint(0, 512, (1, 64), device="cuda")
    with torch.inference_mode():
        before = model(tokens).logits.float()
        assert quantise_weights(model) == 14
        after = model(tokens).logits.float()
    assert 0 < (after - before).norm() / before.norm() < 0.15
