"""Small things that several unit tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    """A random llama: 3 layers, 4 query heads over 2 KV heads of 16, vocabulary of 128, 256 positions, fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=127,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()
