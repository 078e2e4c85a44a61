"""How much of a conversation trace's prompts a prefix cache finds, by the size of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from labkit.memory import KVCacheManager
from labkit.simulation import read_mooncake_jsonl
from labkit.simulation.workloads import TOKENS_PER_HASH_ID

POOL_BLOCKS = (250, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
"""Pools in blocks of 512 tokens; the smallest just holds the longest prompt of the Mooncake conversation trace."""


def prefix_hits(
    path: str | Path, pool_blocks: Sequence[int] = POOL_BLOCKS, *, progress: bool = True
) -> list[dict[str, Any]]:
    """Share of the prompt blocks of a Mooncake trace found in the prefix cache, for each pool size and without limit.

    The real allocator and prefix cache see one prompt after the other, in order of arrival, each freed before the next
    comes: what they keep is what least-recently-used eviction leaves. A block of 512 tokens is known by its hash id
    alone, so that id stands for its tokens and the allocator runs with one "token" a block. Also the last block of a
    prompt counts, which is not full: the published ids say that it is equal, too.

    Columns: ``pool_blocks``, ``pool_tokens``, ``num_prompt_blocks``, ``num_hits``, ``hit_ratio``. The last row is the
    pool that never evicts. Raises ValueError for a pool smaller than the longest prompt, or a trace without hash ids.
    """
    prompts = read_mooncake_jsonl(path).hash_ids or ()
    if not prompts:
        raise ValueError(f"{path} has no requests")
    longest = max(map(len, prompts))
    if min(pool_blocks, default=longest) < longest:
        raise ValueError(f"pool_blocks must be >= {longest}, the longest prompt, got {min(pool_blocks)}")
    without_limit = len(set(chain.from_iterable(prompts)))
    sizes = [*sorted(size for size in set(pool_blocks) if size < without_limit), without_limit]
    total = sum(map(len, prompts))
    rows = []
    for size in tqdm(sizes, desc="Pool sizes", unit="pool", disable=not progress):
        num_hits = _num_hits(prompts, size)
        rows.append(
            {
                "pool_blocks": size,
                "pool_tokens": size * TOKENS_PER_HASH_ID,
                "num_prompt_blocks": total,
                "num_hits": num_hits,
                "hit_ratio": num_hits / total,
            }
        )
    return rows


def _num_hits(prompts: Sequence[Sequence[int]], num_blocks: int) -> int:
    kv = KVCacheManager(num_blocks, block_size=1)
    num_hits = 0
    for hash_ids in prompts:
        prefix = kv.match_prefix([*hash_ids, -1])  # -1: the allocator always leaves one token to compute
        kv.admit("prompt", len(hash_ids), prefix=prefix)
        kv.commit("prompt", hash_ids, len(hash_ids))
        kv.free("prompt")
        num_hits += len(prefix)
    return num_hits


def prefix_hits_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows with the pool in GiB of a model with 128 KiB of K and V a token, such as Llama 3 8B in 16 bit."""
    table = pd.DataFrame(rows)
    table.insert(2, "llama_3_8b_gib", table["pool_tokens"] * 131_072 / 2**30)
    return table
