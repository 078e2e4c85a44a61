"""Fused decoder layers against the transformers layers they replace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from labkit.kernels import elementwise, elementwise_reference
from labkit.models import fused
from labkit.models.fused import FusedAttentionInfo, fuse_decoder_layers

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama-biased": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=5)),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
}
NUM_TOKENS = 23


def no_attention(*args, **kwargs):
    raise AssertionError("a fused layer must not call the attention function of transformers")


AttentionInterface.register("no_mask", no_attention)  # no mask function: transformers builds no mask


def sdpa_attend(info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Causal attention over one sequence, no cache."""
    q, k, v = elementwise_reference.rope(
        qkv, cos, sin, info.num_q_heads, info.num_kv_heads, q_norm=info.q_norm, k_norm=info.k_norm, eps=info.norm_eps
    )
    group = info.num_q_heads // info.num_kv_heads
    q, k, v = q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(group, 0), v.transpose(0, 1)
    i = torch.arange(q.shape[1], device=q.device)
    distance = i[:, None] - i[None, :]
    visible = (distance >= 0) & (distance < (info.sliding_window or q.shape[1]))
    out = F.scaled_dot_product_attention(q, k, v.repeat_interleave(group, 0), attn_mask=visible, scale=info.scale)
    return out.transpose(0, 1).flatten(1)


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    model = kind(config).to(dtype).eval()
    for parameter_name, parameter in model.named_parameters():  # biases and norms start at 0 and 1: hide nothing
        scale = 0.2 if "norm" in parameter_name or "bias" in parameter_name else 0.05
        parameter.data += scale * torch.randn_like(parameter)
    return model


def fuse(model: Any) -> fused.FusionReport:
    report = fuse_decoder_layers(model, sdpa_attend)
    model.set_attn_implementation("no_mask")
    return report


@torch.inference_mode()
def logits(model: Any, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    positions = torch.arange(num_tokens, device=model.device)[None]
    return model(positions * 31 % 97, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_as_transformers_in_float32(name):
    model = build(name)
    expected = logits(model)
    report = fuse(model)
    assert (report.num_layers, report.num_fused, report.reason, report.rotary_reason) == (3, 3, None, None)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3"])
def test_no_less_exact_than_transformers_in_bfloat16(name):
    model = build(name, torch.bfloat16)
    exact = logits(copy.deepcopy(model).double())
    eager = logits(model)
    fuse(model)
    error_fused = (logits(model).double() - exact).norm()
    assert error_fused <= 1.2 * (eager.double() - exact).norm()


def test_same_logits_with_the_triton_kernels(monkeypatch):
    model = build("qwen3")
    expected = logits(model, num_tokens=5)
    fuse(model)
    used = set()

    def spy(name):
        kernel = getattr(elementwise, name)
        return lambda *args: (used.add(name), kernel(*args))[1]

    class Ops:
        rms_norm, silu_mul, rope_cos_sin = (staticmethod(spy(n)) for n in ("rms_norm", "silu_mul", "rope_cos_sin"))

    monkeypatch.setattr(fused, "elementwise_ops", lambda device: Ops)
    torch.testing.assert_close(logits(model, num_tokens=5), expected, atol=1e-5, rtol=1e-5)
    assert used == {"rms_norm", "silu_mul", "rope_cos_sin"}


@pytest.mark.gpu
def test_fused_forward_in_a_cuda_graph():
    model = build("qwen3", torch.bfloat16)
    exact = logits(copy.deepcopy(model).double())
    model.cuda()
    eager = logits(model).cpu()
    fuse(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        logits(model)  # compiles the kernels
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = logits(model)
    graph.replay()
    error_fused = (captured.cpu().double() - exact).norm()
    assert error_fused <= 1.2 * (eager.double() - exact).norm()


def storage_bytes(model: Any) -> int:
    """Bytes of all tensors the model's modules hold, parameters or not, each storage once."""
    held = [t for module in model.modules() for t in vars(module).values() if isinstance(t, torch.Tensor)]
    storages = [t.untyped_storage() for t in [*model.parameters(), *held]]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("name", ["llama-biased", "llama-tied", "qwen3"])
def test_weights_are_kept_once_and_under_their_names(name):
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    num_bytes = storage_bytes(model)
    fuse(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert storage_bytes(model) == num_bytes
    if name == "llama-tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("assign", [False, True])
def test_loading_weights_after_fusing_takes_effect(assign):
    model, other = build("llama-biased"), build("llama-biased")
    for parameter in other.parameters():
        parameter.data *= 1.1
    fuse(model)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    torch.testing.assert_close(logits(model), logits(other), atol=1e-5, rtol=1e-5)
    num_bytes = storage_bytes(other)
    assert storage_bytes(model) == num_bytes


def test_a_fused_model_can_change_dtype():
    model = build("qwen3")
    expected = logits(copy.deepcopy(model).double())
    fuse(model)
    model.double()
    assert storage_bytes(model) == storage_bytes(build("qwen3", torch.float64))
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)


def test_saved_and_loaded_by_transformers(tmp_path):
    model = build("qwen2-window")
    expected = logits(model)
    fuse(model)
    model.save_pretrained(tmp_path)
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(loaded), expected)


def test_input_embeddings_of_the_caller_survive():
    model = build("llama")
    fuse(model)
    embeds = torch.randn(1, 4, 48)
    kept = embeds.clone()
    with torch.inference_mode():
        model(inputs_embeds=embeds, position_ids=torch.arange(4)[None], use_cache=False)
    assert torch.equal(embeds, kept)


def test_dynamic_rope_keeps_the_rotary_module_and_says_so():
    model = build("llama")
    model.model.rotary_emb.rope_type = "dynamic"
    before = model.model.rotary_emb
    report = fuse(model)
    assert report.num_fused == 3
    assert "'dynamic'" in str(report.rotary_reason)
    assert model.model.rotary_emb is before


def test_other_structures_are_left_alone_with_a_reason():
    model = Gemma2ForCausalLM(Gemma2Config(**SHAPE)).eval()
    expected = logits(model)
    report = fuse_decoder_layers(model, sdpa_attend)
    assert report.num_fused == 0
    assert "Gemma2DecoderLayer is not one of the known" in str(report.reason)
    assert torch.equal(logits(model), expected)


class LowRankLinear(torch.nn.Linear):
    """Stands for an adapter or a quantised layer: a Linear whose forward does more."""


def hook(model):
    model.model.layers[1].self_attn.register_forward_hook(lambda *args: None)


def replace_forward(model):
    model.model.layers[1].mlp.forward = lambda x: x


def adapt(model):
    model.model.layers[1].self_attn.k_proj = LowRankLinear(48, 32, bias=False)


def mix_dtypes(model):
    model.model.layers[1].mlp.up_proj.double()


def change_activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook, "layer 1: self_attn has hooks"),
        (replace_forward, "layer 1: mlp has hooks or a replaced forward"),
        (adapt, "q_proj, k_proj and v_proj must be plain nn.Linear, found LowRankLinear"),
        (mix_dtypes, "gate_proj and up_proj differ in dtype"),
        (change_activation, "the activation is GELU"),
        (lambda model: model.train(), "training mode"),
    ],
)
def test_changed_layers_are_refused(change, reason):
    model = build("llama")
    change(model)
    report = fuse_decoder_layers(model, sdpa_attend)
    assert report.num_fused == 0
    assert reason in str(report.reason)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


def test_what_fused_layers_cannot_do_is_refused():
    model = build("llama")
    fuse(model)
    tokens, positions = torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None]
    with torch.inference_mode():
        with pytest.raises(ValueError, match="use_cache=False"):
            model(tokens, position_ids=positions, use_cache=True)
        with pytest.raises(ValueError, match=r"packed tokens.*\(2, 3, 48\)"):
            model(tokens.expand(2, -1), use_cache=False)
        with pytest.raises(ValueError, match="output_hidden_states is not available"):
            model(tokens, position_ids=positions, use_cache=False, output_hidden_states=True)
    with pytest.raises(RuntimeError, match="no backward pass"):
        model(tokens, position_ids=positions, use_cache=False)
    model.set_attn_implementation("eager")
    with torch.inference_mode(), pytest.raises(ValueError, match="takes no attention_mask"):
        model(tokens, position_ids=positions, use_cache=False)
