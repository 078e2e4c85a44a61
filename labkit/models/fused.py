"""Fused decoder layers: the Llama layer of transformers in nine launches instead of about thirty-five.

    hidden ─► rms_norm ─► one GEMM for q, k, v ─► attend ─► o_proj GEMM, added onto hidden
           ─► rms_norm ─► one GEMM for gate, up ─► silu_mul ─► down_proj GEMM, added onto hidden

A module swap on the loaded model, so nothing is compiled and any batch size runs. `attend` comes from the engine: it
rotates q and k, writes K and V into the paged cache and attends. The original modules stay inside the fused
layer with their names, and their weights become views of the merged ones: `state_dict()` is unchanged and memory is
counted once.

Measured on an H200: see tests/benchmarks/bench_fused_forward.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from labkit.kernels import elementwise, elementwise_reference

from .fused_shard import LocalLayers
from .fused_structure import merge_rows, sliding_window_of, why_layer_cannot_fuse


@dataclass(frozen=True, slots=True)
class FusedAttentionInfo:
    """What `attend` must know about the layer that calls it.

    q_norm, k_norm: [head_dim] weights of a per-head RMSNorm before the rotation (Qwen3), else None.
    sliding_window: a query at position i sees key position j iff i - j < sliding_window; None = all before it.
    """

    layer_idx: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float


AllReduce = Callable[[torch.Tensor], object]
"""Replaces a tensor, in place, by its sum over the ranks that share a model."""

Attend = Callable[[FusedAttentionInfo, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(info, qkv, cos, sin) -> [num_tokens, num_q_heads * head_dim].

qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], the merged projection before norm and rotation; may be
overwritten. cos, sin: [num_tokens, head_dim], float32 or the model's dtype.
"""


@dataclass(frozen=True, slots=True)
class FusionReport:
    """What `fuse_decoder_layers` did. reason: why nothing was fused, else None; rotary_reason: likewise for cos/sin."""

    num_layers: int
    num_fused: int
    reason: str | None = None
    rotary_reason: str | None = None


def elementwise_ops(device: torch.device) -> Any:
    """The module with rms_norm, silu_mul, rope...: Triton kernels on a GPU, plain torch on a CPU."""
    return elementwise if device.type == "cuda" else elementwise_reference


class FusedRMSNorm(nn.Module):
    """RMSNorm of [..., hidden_size] in one launch; shares the weight of the norm it replaces."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight: nn.Parameter = norm.weight  # pyright: ignore[reportAttributeAccessIssue]
        self.variance_epsilon = float(norm.variance_epsilon)  # pyright: ignore[reportArgumentType]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        ops = elementwise_ops(rows.device)
        return ops.rms_norm(rows, self.weight, self.variance_epsilon).view(hidden_states.shape)


class FusedRotaryEmbedding(nn.Module):
    """cos and sin of all rotation angles in one launch, in float32; position_ids [1, num_tokens] -> two [1, T, D]."""

    inv_freq: torch.Tensor

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.register_buffer("inv_freq", rotary.inv_freq, persistent=False)  # pyright: ignore[reportArgumentType]
        self.attention_scaling = float(rotary.attention_scaling)  # pyright: ignore[reportArgumentType]

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops = elementwise_ops(position_ids.device)
        cos, sin = ops.rope_cos_sin(position_ids.flatten(), self.inv_freq.float(), self.attention_scaling)
        return cos.view(*position_ids.shape, -1), sin.view(*position_ids.shape, -1)


class FusedDecoderLayer(nn.Module):
    """A Llama-structured layer of packed tokens: hidden_states [1, num_tokens, hidden_size] in and out.

    Inference only. Overwrites its input, except in layer 0, whose input may be the caller's.
    """

    qkv_weight: torch.Tensor  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]; q, k, v_proj are its rows
    qkv_bias: torch.Tensor | None
    gate_up_weight: torch.Tensor  # [2 * intermediate_size, hidden_size]
    gate_up_bias: torch.Tensor | None
    info: FusedAttentionInfo

    def __init__(self, layer: Any, attend: Attend, all_reduce: AllReduce | None = None) -> None:
        """``all_reduce`` is given where the layer holds this rank's heads and columns only."""
        super().__init__()
        self.self_attn = layer.self_attn
        self.mlp = layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.attend = attend
        self.all_reduce = all_reduce
        self.sliding_window = sliding_window_of(layer)
        self.merge()
        self.register_load_state_dict_post_hook(lambda module, _: module.merge())  # assign=True replaces parameters

    def merge(self) -> None:
        """Make the projections that share an input views of one matrix. Nothing moves if they are already."""
        attn, mlp = self.self_attn, self.mlp
        self.qkv_weight, self.qkv_bias = merge_rows([attn.q_proj, attn.k_proj, attn.v_proj])
        self.gate_up_weight, self.gate_up_bias = merge_rows([mlp.gate_proj, mlp.up_proj])
        q_norm, k_norm = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)
        self.info = FusedAttentionInfo(
            layer_idx=attn.layer_idx,
            num_q_heads=attn.q_proj.weight.shape[0] // attn.head_dim,  # of this shard, whatever the config says
            num_kv_heads=attn.k_proj.weight.shape[0] // attn.head_dim,
            head_dim=attn.head_dim,
            scale=attn.scaling,
            sliding_window=self.sliding_window,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            norm_eps=1e-6 if q_norm is None else q_norm.variance_epsilon,
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FusedDecoderLayer:
        """`to`, `cuda`, `half`...: each parameter moved alone, so merge them anew."""
        super()._apply(fn, recurse)
        self.merge()
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: object = None,
        past_key_values: object = None,  # what transformers before 5.24 calls the cache
        **_: object,  # position_ids, use_cache: nothing that changes the result
    ) -> torch.Tensor:
        if attention_mask is not None or cache is not None or past_key_values is not None:
            raise ValueError(
                "a fused layer attends over the engine's paged cache: it takes no attention_mask, cache or "
                "past_key_values (call the model with use_cache=False)"
            )
        if position_embeddings is None or hidden_states.ndim != 3 or hidden_states.shape[0] != 1:
            raise ValueError(
                "a fused layer takes packed tokens: hidden_states [1, num_tokens, hidden_size] with "
                f"position_embeddings, got hidden_states {tuple(hidden_states.shape)}"
            )
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise RuntimeError("fused layers have no backward pass: run them under torch.inference_mode()")
        ops = elementwise_ops(hidden_states.device)
        residual = hidden_states[0].clone() if self.info.layer_idx == 0 else hidden_states[0]
        cos, sin = position_embeddings

        norm = self.input_layernorm
        normed = ops.rms_norm(residual, norm.weight, norm.variance_epsilon)
        qkv = F.linear(normed, self.qkv_weight, self.qkv_bias)
        attended = self.attend(self.info, qkv, cos[0], sin[0])
        add_projection(residual, attended, self.self_attn.o_proj, self.all_reduce)

        norm = self.post_attention_layernorm
        normed = ops.rms_norm(residual, norm.weight, norm.variance_epsilon)
        gated = ops.silu_mul(F.linear(normed, self.gate_up_weight, self.gate_up_bias))
        add_projection(residual, gated, self.mlp.down_proj, self.all_reduce)
        return residual[None]


def add_projection(
    residual: torch.Tensor, x: torch.Tensor, linear: nn.Linear, all_reduce: AllReduce | None = None
) -> None:
    """residual += linear(x), in place. Without a bias the GEMM itself adds (beta = 1), rounding once, in one launch.

    With ``all_reduce``, ``x`` and the weight are this rank's columns: the products are summed first.
    """
    if all_reduce is not None:
        product = F.linear(x, linear.weight)
        all_reduce(product)
        residual.add_(product)
        if linear.bias is not None:  # every rank has all of it
            residual.add_(linear.bias)
    elif linear.bias is None:
        residual.addmm_(x, linear.weight.t())
    else:
        residual.add_(F.linear(x, linear.weight, linear.bias))


def fuse_decoder_layers(model: Any, attend: Attend, all_reduce: AllReduce | None = None) -> FusionReport:
    """Swap the decoder layers, final norm and rotary embedding of a loaded model for fused ones, in place.

    model: a transformers model in eval mode, with or without LM head, of the Llama structure (llama, mistral, qwen2,
    qwen3). Afterwards call it with packed tokens, `model(input_ids[None], position_ids=positions[None],
    use_cache=False)`, under an attention implementation for which transformers builds no mask.
    Either all layers are fused or, if one cannot be, none: the report says why.

    all_reduce: for a model that transformers cut for several ranks, on each of them. It cannot be undone.
    """
    base = model.base_model
    layers = getattr(base, "layers", None)
    if layers is None or not len(layers):
        return FusionReport(0, 0, f"{type(base).__name__} has no decoder layers under .layers")
    if model.training:
        return FusionReport(len(layers), 0, "the model is in training mode: call model.eval() first")
    local = None if all_reduce is None else LocalLayers(layers)
    for i, layer in enumerate(layers):
        reason = why_layer_cannot_fuse(layer)
        if reason is not None:
            if local is not None:
                local.restore()
            return FusionReport(len(layers), 0, f"layer {i}: {reason}")
    for i, layer in enumerate(layers):
        layers[i] = FusedDecoderLayer(layer, attend, all_reduce).eval()
        if torch.cuda.is_initialized():
            # What was merged is free now. The next layer's smaller tensors would be cut out of its larger ones, and the
            # rest of those be lost: 68 MB a layer of Llama-2-13B's shape with 8 KV heads.
            torch.cuda.empty_cache()
    base.norm = FusedRMSNorm(base.norm).eval()
    base.register_forward_pre_hook(refuse_recording, with_kwargs=True)

    rope_type = base.rotary_emb.rope_type
    if rope_type in ("dynamic", "longrope"):
        reason = f"rope type {rope_type!r} derives its frequencies from the largest position of the batch"
        return FusionReport(len(layers), len(layers), rotary_reason=reason)
    base.rotary_emb = FusedRotaryEmbedding(base.rotary_emb).eval()
    return FusionReport(len(layers), len(layers))


def refuse_recording(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """transformers records hidden states and attention through hooks on classes that are gone after fusing."""
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise ValueError(f"{name} is not available from fused layers: load the model without fusing it")
