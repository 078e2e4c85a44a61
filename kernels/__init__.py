"""Paged attention and its companions in Triton; plain tensors in, plain tensors out, torch and triton only.

    q [num_tokens, num_q_heads, head_dim]           tokens of all sequences, one after the other
      ├─ seq 0 ─┬─ seq 1 ┬─────── seq 2 ──────┤
      0         3        4                    9     = query_start_loc: a prefill of 3, a decode, a prefill of 5

    block_table [num_seqs, max_blocks]              seq 1 ─► [7, 2, 5, ·]   seq_lens[1] = 37: two full blocks, 5 slots
    kv.k, kv.v  [num_blocks, num_kv_heads, block_size, head_dim]

`paged_attention` serves decode, prefill and mixed batches. `write_kv` puts new K and V into their slots,
`write_quantised_kv` quantises them on the way; `copy_blocks` and `swap_blocks` move whole blocks. `reference` holds
the obvious torch version of each; `steps` builds the decode kernel in five runnable steps; `tuning` holds the tile
sizes per GPU generation.

On a machine without a GPU set TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter.
"""

from . import reference
from .attention import Workspace, paged_attention
from .copy import copy_blocks, swap_blocks
from .pages import KVPages, QuantisedKVPages, QuantisedPages
from .write import write_kv
from .write_quantised import write_quantised_kv

__all__ = [
    "KVPages",
    "QuantisedKVPages",
    "QuantisedPages",
    "Workspace",
    "copy_blocks",
    "paged_attention",
    "reference",
    "swap_blocks",
    "write_kv",
    "write_quantised_kv",
]
