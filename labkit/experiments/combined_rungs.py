"""The rungs of the combined experiment, what two articles claim of them, and the ablation between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to serve: who allocates, who batches, how many KV heads, in which format, sharing or not.

    Attributes:
        few_kv_heads: grouped-query attention, 8 KV heads where that divides the query heads; else one for each.
        shares_prefix: prompts begin with the same tokens, and the prefix cache is on.
        claimed_concurrency, claimed_saving, claimed_speedup: what the article says (claims B43 to B47: Llama-2-13B on
            an A100-40GB, context 4096, batch raised until memory is full); None where it says nothing.
    """

    name: str
    kv_allocator: Literal["reserve_max", "paged"] = "reserve_max"
    scheduler: Literal["static", "continuous"] = "static"
    few_kv_heads: bool = False
    kv_cache_dtype: Literal["auto", "int8", "int4"] = "auto"
    shares_prefix: bool = False
    claimed_concurrency: int | None = None
    claimed_saving: float | None = None
    claimed_speedup: float | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a block; int4 keys share scales over 32 tokens."""
        return 32 if self.kv_cache_dtype == "int4" else 16


LADDER = (
    Rung("baseline", claimed_concurrency=4, claimed_saving=0.0, claimed_speedup=1.0),
    Rung("+ paged", "paged", claimed_concurrency=6, claimed_saving=0.33, claimed_speedup=1.4),
    Rung("+ continuous batching", "paged", "continuous"),
    Rung("+ GQA", "paged", "continuous", True, claimed_concurrency=10, claimed_saving=0.58, claimed_speedup=2.1),
    Rung(
        "+ INT8 KV",
        "paged",
        "continuous",
        True,
        "int8",
        claimed_concurrency=16,
        claimed_saving=0.73,
        claimed_speedup=3.2,
    ),
    Rung("+ INT4 KV", "paged", "continuous", True, "int4"),
    Rung("+ shared prefix", "paged", "continuous", True, "int4", True),
)
"""Each rung keeps what the one before it has; INT4 takes the place of INT8. The last two go beyond the articles."""

BATCHING, GQA, INT8 = "paged + continuous", "GQA", "INT8 KV"

ABLATION = {
    frozenset[str](): LADDER[0],
    frozenset({BATCHING}): LADDER[2],
    frozenset({GQA}): Rung("GQA alone", few_kv_heads=True),
    frozenset({BATCHING, GQA}): LADDER[3],
    frozenset({BATCHING, INT8}): Rung("INT8 KV without GQA", "paged", "continuous", False, "int8"),
    frozenset({BATCHING, GQA, INT8}): LADDER[4],
}
"""Six combinations: two squares that share a side, batching x GQA in 16 bit and GQA x INT8 with batching."""

RUNGS = {rung.name: rung for rung in (*LADDER, *ABLATION.values())}
"""All rungs by name: the ladder first, then what only the ablation needs."""
