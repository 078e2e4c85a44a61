"""Models by shape: enough to know the size of weights and cache without loading anything."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import attention_kind
from .cache_spec import KVCacheSpec
from .formats import BITS, dtype_name
from .gpus import look_up
from .units import ceil_div, require_int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with gated feed-forward layers, as Llama, Qwen, Mistral, Phi-3 and Gemma are.

    Attributes:
        max_model_len: longest context the model was made for, in tokens.
        num_norms: norm weights a layer, each ``hidden_size`` long.
        num_experts, num_active_experts: feed-forward blocks a layer, and how many of them a token passes through.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    num_norms: int = 2
    num_experts: int = 1
    num_active_experts: int = 1

    @property
    def attention(self) -> str:
        """MHA, GQA or MQA."""
        return attention_kind(self.num_heads, self.num_kv_heads)

    @property
    def num_params(self) -> int:
        """All parameters, exactly."""
        return self.num_params_per_gpu(1)

    def num_params_per_gpu(self, num_gpus: int) -> int:
        """Parameters on each of ``num_gpus`` GPUs under tensor parallelism.

        Heads, feed-forward columns and the vocabulary are divided (the last two rounded up); norms and routers are
        repeated, and so are KV heads when there are fewer of them than GPUs.

        Raises ValueError if heads cannot be divided evenly.
        """
        h = self.hidden_size
        q_size = self.num_heads // num_gpus * self.head_dim
        kv_size = self.kv_heads_per_gpu(num_gpus) * self.head_dim
        attention = h * (q_size + 2 * kv_size) + q_size * h + self.qkv_bias * (q_size + 2 * kv_size)
        experts = self.num_experts * 3 * h * ceil_div(self.intermediate_size, num_gpus)  # gate, up, down
        router = h * self.num_experts if self.num_experts > 1 else 0
        layer = attention + experts + router + self.num_norms * h
        embeddings = ceil_div(self.vocab_size, num_gpus) * h * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * layer + h  # the last norm

    def kv_heads_per_gpu(self, num_gpus: int) -> int:
        """KV heads on each GPU: divided while there are enough, then each repeated on several GPUs.

        Raises ValueError if query heads or KV heads cannot be divided evenly.
        """
        require_int("num_gpus", num_gpus, 1)
        kv = self.num_kv_heads
        if self.num_heads % num_gpus or (kv % num_gpus and num_gpus % kv):
            raise ValueError(
                f"num_gpus={num_gpus} cannot divide {self.name}'s {self.num_heads} query heads and {kv} KV heads evenly"
            )
        return max(1, kv // num_gpus)

    def weights_bytes(self, dtype: object = "bfloat16", num_gpus: int = 1) -> int:
        """Bytes of the weights on each GPU: every parameter at the width of ``dtype``, without scales."""
        return ceil_div(self.num_params_per_gpu(num_gpus) * BITS[dtype_name(dtype)], 8)

    def num_params_used(self, batch_size: int, num_gpus: int = 1) -> int:
        """Parameters on each GPU that a decode step of ``batch_size`` requests must read, at least.

        Left out are an input embedding that is a table of its own (a step reads one row a request) and, for
        mixtures, the experts that ``batch_size`` tokens cannot all reach.
        """
        unread = 0 if self.tied_embeddings else ceil_div(self.vocab_size, num_gpus) * self.hidden_size
        idle_experts = max(0, self.num_experts - batch_size * self.num_active_experts)
        unread += self.num_layers * idle_experts * 3 * self.hidden_size * ceil_div(self.intermediate_size, num_gpus)
        return self.num_params_per_gpu(num_gpus) - unread

    def kv_spec(
        self, dtype: object = "bfloat16", block_size: int = 16, *, value_dtype: object = None, num_gpus: int = 1
    ) -> KVCacheSpec:
        """The KV cache of this model on each of ``num_gpus`` GPUs."""
        kv_heads = self.kv_heads_per_gpu(num_gpus)
        return KVCacheSpec(self.num_layers, kv_heads, self.head_dim, dtype, block_size, value_dtype=value_dtype)


def _llama(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    ffn: int,
    vocab: int,
    context: int,
    *,
    tied: bool = False,
    qkv_bias: bool = False,
    experts: tuple[int, int] = (1, 1),
) -> ModelShape:
    """A shape with head_dim = hidden / heads."""
    return ModelShape(
        name, layers, heads, kv_heads, hidden // heads, hidden, ffn, vocab, context, tied, qkv_bias, 2, *experts
    )


# Figures are those of each model's config.json.
MODEL_SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("llama-2-7b", 32, 32, 32, 4096, 11008, 32000, 4096),
        _llama("llama-2-13b", 40, 40, 40, 5120, 13824, 32000, 4096),
        _llama("llama-2-70b", 80, 64, 8, 8192, 28672, 32000, 4096),
        _llama("llama-3-8b", 32, 32, 8, 4096, 14336, 128256, 8192),
        _llama("llama-3-70b", 80, 64, 8, 8192, 28672, 128256, 8192),
        _llama("qwen2.5-0.5b", 24, 14, 2, 896, 4864, 151936, 32768, tied=True, qkv_bias=True),
        _llama("qwen2.5-7b", 28, 28, 4, 3584, 18944, 152064, 131072, qkv_bias=True),
        _llama("qwen2.5-72b", 80, 64, 8, 8192, 29568, 152064, 131072, qkv_bias=True),
        _llama("mistral-7b", 32, 32, 8, 4096, 14336, 32000, 32768),
        _llama("mixtral-8x7b", 32, 32, 8, 4096, 14336, 32000, 32768, experts=(8, 2)),
        _llama("smollm2-135m", 30, 9, 3, 576, 1536, 49152, 8192, tied=True),
        _llama("smollm2-360m", 32, 15, 5, 960, 2560, 49152, 8192, tied=True),
        _llama("smollm2-1.7b", 24, 32, 32, 2048, 8192, 49152, 8192, tied=True),
        _llama("phi-3-mini", 32, 32, 32, 3072, 8192, 32064, 4096),
        ModelShape("gemma-2-9b", 42, 16, 8, 256, 3584, 14336, 256000, 8192, tied_embeddings=True, num_norms=4),
    )
}


def model_shape(name: str) -> ModelShape:
    """Look up a shape of :data:`MODEL_SHAPES` by name, such as "llama-2-13b".

    Raises ValueError, with the nearest names, if there is none; TypeError if ``name`` is no string.
    """
    return look_up(name, MODEL_SHAPES, "model shape")
