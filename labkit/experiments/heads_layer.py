"""One decode layer under MHA, GQA and MQA: its FLOPs by formula, its latency and memory as measured.

The layer is Llama-2-70B's (hidden 8,192, 64 query heads of 128, MLP 28,672) with 64, 8 or 1 KV heads; the real model
has 8. Weights and cache are random: the time does not depend on their values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from labkit.kv_math import attention_kind, kv_bytes_per_token

HIDDEN, NUM_HEADS, HEAD_DIM, INTERMEDIATE = 8192, 64, 128, 28672
KV_HEADS = (64, 8, 1)
BATCHES = ((1, 4096), (1, 32768), (16, 4096), (64, 4096))
BLOCK_SIZE = 16


def attention_flops(num_heads: int, num_kv_heads: int, head_dim: int, hidden_size: int, context: int) -> dict[str, int]:
    """FLOPs of one layer's attention for one new token over ``context`` keys, a multiply-add counted as two.

    ::

        query_output  q_proj and o_proj        2 x 2 x hidden x num_heads x head_dim
        key_value     k_proj and v_proj        2 x 2 x hidden x num_kv_heads x head_dim
        attend        q . k, and weights . v   2 x 2 x num_heads x head_dim x context

    ``num_kv_heads`` enters by the K and V projections alone: sharing a KV head saves bytes, not products with it.
    """
    return {
        "query_output": 4 * hidden_size * num_heads * head_dim,
        "key_value": 4 * hidden_size * num_kv_heads * head_dim,
        "attend": 4 * num_heads * head_dim * context,
    }


def flops_rows(context: int = 4096) -> list[dict[str, Any]]:
    """FLOPs and KV bytes a token of the 64-head layer with 64, 8 and 1 KV heads: computed, not measured."""
    rows = []
    for num_kv_heads in KV_HEADS:
        flops = attention_flops(NUM_HEADS, num_kv_heads, HEAD_DIM, HIDDEN, context)
        kv_bytes = kv_bytes_per_token(1, num_kv_heads, HEAD_DIM)
        rows.append(
            {
                "part": "attention FLOPs",
                "source": "computed",
                "kind": attention_kind(NUM_HEADS, num_kv_heads),
                "num_kv_heads": num_kv_heads,
                "context": context,
                **{f"{name}_flops": count for name, count in flops.items()},
                "kv_bytes_per_token": kv_bytes,
                "flops_per_kv_byte": flops["attend"] / (context * kv_bytes),
            }
        )
    return rows


def layer_rows() -> list[dict[str, Any]]:
    """Microseconds and bytes of a decode step of the layer in bfloat16, for each batch and number of KV heads.

    attention_us: the paged decode kernel. projections_us: q, k, v in one product, and o. mlp_us: gate and up in one
    product, and down. layer_us: all in one go. Norms, RoPE and the writing of one token's K and V are left out: they
    are the same for all, or nearly. Times are of CUDA graphs, medians of five windows, over up to 16 caches in turn, so
    that none finds its K and V in L2 (but in the smallest case: 16 x 2 MiB fit).
    """
    from labkit.kernels.measure import PagePool, time_calls

    pool = PagePool.allocate(4.0)
    rows = []
    for num_kv_heads in KV_HEADS:
        weights = _Weights.random(num_kv_heads)
        for batch, context in BATCHES:
            attend = _attention_calls(pool, num_kv_heads, batch, context)
            x = torch.randn(batch, HIDDEN, device="cuda", dtype=torch.bfloat16)
            times = {
                "attention_us": time_calls(attend),
                "projections_us": time_calls([lambda w=weights, x=x: w.output(w.queries_keys_values(x))]),
                "mlp_us": time_calls([lambda w=weights, x=x: w.mlp(x)]),
                "layer_us": time_calls([lambda w=weights, x=x, a=a: w.layer(x, a) for a in attend]),
            }
            kv_bytes = batch * context * kv_bytes_per_token(1, num_kv_heads, HEAD_DIM)
            rows.append(
                {
                    "part": "decode layer",
                    "source": "measured",
                    "kind": attention_kind(NUM_HEADS, num_kv_heads),
                    "num_kv_heads": num_kv_heads,
                    "batch": batch,
                    "context": context,
                    **times,
                    "kv_bytes": kv_bytes,
                    "weight_bytes": weights.num_bytes,
                    "attention_gbps": kv_bytes / times["attention_us"] / 1e3,
                }
            )
    return rows


class _Weights:
    """A layer's matrices, merged where they share an input as an engine merges them."""

    def __init__(self, qkv: torch.Tensor, output: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._qkv, self._output, self._gate_up, self._down = qkv, output, gate_up, down
        self.num_bytes = sum(weight.nbytes for weight in (qkv, output, gate_up, down))

    @classmethod
    def random(cls, num_kv_heads: int) -> _Weights:
        width = NUM_HEADS * HEAD_DIM
        shapes = (
            (width + 2 * num_kv_heads * HEAD_DIM, HIDDEN),
            (HIDDEN, width),
            (2 * INTERMEDIATE, HIDDEN),
            (HIDDEN, INTERMEDIATE),
        )
        return cls(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5 for shape in shapes))

    def queries_keys_values(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._qkv)[:, : NUM_HEADS * HEAD_DIM]

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        return F.linear(attended, self._output)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, self._gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self._down)

    def layer(self, x: torch.Tensor, attend: Any) -> torch.Tensor:
        self.queries_keys_values(x)
        return self.mlp(x + self.output(attend().flatten(1)))


def _attention_calls(pool: Any, num_kv_heads: int, batch: int, context: int) -> list[Any]:
    """The same decode step over several disjoint sets of pages, so that none finds its cache in L2."""
    from labkit.kernels import Workspace, paged_attention
    from labkit.kernels.measure import random_tables

    kv = pool.pages(num_kv_heads, HEAD_DIM, BLOCK_SIZE)
    workspace = Workspace.allocate(HEAD_DIM, kv.v.device)
    q = torch.randn(batch, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")

    def call(table: torch.Tensor) -> torch.Tensor:
        return paged_attention(
            q, kv, table, seq_lens, starts, scale=HEAD_DIM**-0.5, max_query_len=1, workspace=workspace
        )

    return [lambda table=table: call(table) for table in random_tables(kv, [context] * batch)]
