"""Who answers the attention calls of the forward pass that is running now.

Hugging Face layers call attention with a fixed signature, and some models drop keyword arguments they do not know.
So what a step knows (block tables, slots, the cache) does not travel through the model: it waits here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from labkit.models import FusedAttentionInfo


class AttentionHandler(Protocol):
    """Answers one layer's attention call for a flattened batch.

    q [num_tokens, num_q_heads, D_k], k [num_tokens, num_kv_heads, D_k], v [num_tokens, num_kv_heads, D_v];
    returns [num_tokens, num_q_heads, D_v]. ``sliding_window``: position i sees j iff 0 <= i - j < sliding_window.
    """

    def __call__(
        self,
        layer_idx: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def attend_fused(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """The same for a fused layer, from its merged projection; returns [num_tokens, num_q_heads * D_v]."""
        ...


# A context variable, not a global: two engines may run in two threads.
_handler: ContextVar[AttentionHandler] = ContextVar("labkit_attention_handler")


@contextmanager
def attention_handled_by(handler: AttentionHandler) -> Iterator[None]:
    """Within this block, every attention call of a model goes to ``handler``."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def current_handler() -> AttentionHandler:
    """The handler of the forward pass that is running. Raises RuntimeError outside of one."""
    try:
        return _handler.get()
    except LookupError:
        raise RuntimeError(
            "this model's attention belongs to a labkit LLM and needs its step metadata: generate through the LLM, "
            "or close it (llm.close()) to get the model's own attention back"
        ) from None
