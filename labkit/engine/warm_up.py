"""Compile before the first request what steps need, so that none of them waits for a compiler.

A kernel is compiled anew for another tile or another number of lanes, which the size of a batch decides
(labkit.kernels.attention). CUDA graphs compile the decode step of each size while they capture it; the rest is run here
once.
"""

from __future__ import annotations

from labkit.quant import KVPolicy

from .decode_graphs import capture_sizes
from .model_executor import ModelExecutor

PROMPT = 32  # tokens: more than the decode kernel takes for a sequence


def compile_kernels(
    executor: ModelExecutor, max_num_seqs: int, captures_graphs: bool, backend_name: str, policy: KVPolicy | None
) -> None:
    """Run the kernels once. Raises ValueError if they do not know a format of ``policy``."""
    batches = [[PROMPT, 1]]  # on a CPU nothing is compiled, only tried
    if executor.device.type == "cuda":
        batches = batches_to_compile(max_num_seqs, captures_graphs)
    try:
        for query_lens in batches:
            executor.warm_up(query_lens)
    except (ValueError, TypeError) as error:
        if policy is None:
            raise
        raise ValueError(
            f"attention_backend={backend_name!r} cannot run kv_cache_dtype ({policy}): {error}; use "
            "attention_backend='torch' or other formats"
        ) from error


def batches_to_compile(max_num_seqs: int, captures_graphs: bool) -> list[list[int]]:
    """New tokens of each sequence, for batches that together need every kernel of a step that no graph captures.

    With a prompt: for few sequences and for as many as there may be. Without: for each size that a graph would have.
    """
    with_prompt = [[PROMPT] + [1] * (count - 1) for count in sorted({min(2, max_num_seqs), max_num_seqs})]
    return with_prompt + ([] if captures_graphs else [[1] * size for size in capture_sizes(max_num_seqs)])
