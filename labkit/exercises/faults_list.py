"""Eight bugs, each a line or two of a real class, and a switch that puts them in for a while."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch


@dataclass(frozen=True, slots=True)
class Edit:
    """``right``, a piece of the source of ``place`` ("module:Class.method"), replaced by ``wrong``."""

    place: str
    right: str
    wrong: str

    @property
    def function(self) -> Callable[..., Any]:
        """The function or method as it is now."""
        return resolve_name(self.place)

    def __str__(self) -> str:
        wrong = self.wrong or "(nothing)"
        return f"{self.place.partition(':')[2]} should say\n    {self.right.strip()}\nand said\n    {wrong}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One bug.

    Attributes:
        kind: where its scenario runs, a key of :data:`labkit.exercises.faults_scenario.KINDS`.
        sign: what such a bug shows.
        evidence: what this one shows, in words that do not name it.
        why: how the wrong line leads there.
    """

    name: str
    kind: str
    edits: tuple[Edit, ...]
    sign: str
    evidence: str
    why: str


@contextmanager
def switched_on(fault: Fault) -> Iterator[None]:
    """Within this block the real classes have the bug; afterwards, whatever happens, they do not."""
    with ExitStack() as patched:
        for edit in fault.edits:
            owner, _, name = edit.place.rpartition("." if "." in edit.place.partition(":")[2] else ":")
            patched.enter_context(patch.object(resolve_name(owner), name, _edited(edit)))
        yield


def _edited(edit: Edit) -> Any:
    """The function compiled anew from its edited source, in the module that it came from."""
    function = edit.function
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(edit.right) != 1:
        raise RuntimeError(f"{edit.place} holds {source.count(edit.right)} times, not once: {edit.right}")
    edited = "from __future__ import annotations\n" + source.replace(edit.right, edit.wrong)
    compiled = compile(edited, f"<{edit.place} with a fault>", "exec", dont_inherit=True)
    made: dict[str, Any] = {}
    exec(compiled, function.__globals__, made)
    return made[function.__name__]


FAULTS = (
    Fault(
        "lost reference",
        "simulated",
        (
            Edit(
                "labkit.memory.block_pool:BlockPool.share",
                "self.ref_cnt[block_id] += 1",
                "self.ref_cnt[block_id] = 1",
            ),
        ),
        "a block stands in more tables than its ref_cnt says, from the step on in which a request takes blocks over",
        "the first complaint of check() comes in a step that shares blocks (by a fork), before any is freed",
        "Sharing does not count up, so the first of two holders to end puts a block on the free list that the other "
        "still reads. Whoever gets it next writes into it.",
    ),
    Fault(
        "double free",
        "simulated",
        (
            Edit(
                "labkit.memory.kv_cache_manager:KVCacheManager.extend",
                "self.blocks.release([src])",
                "self.blocks.release([src, src])",
            ),
        ),
        "ref_cnt is right when blocks are shared and too small from a step on in which somebody lets go of one",
        "sharing counts rightly; the first complaint of check() comes in the step after a fork, which copies a block",
        "Copy on write lets go of the source twice. With two holders its ref_cnt falls to 0 while one of them still "
        "writes into it: it is on the free list, and the next request gets it as well.",
    ),
    Fault(
        "wrong slot",
        "tiny Llama, int8 KV cache",
        (
            Edit(
                "labkit.engine.model_executor:stage_inputs",
                "blocks = block_table[row, positions // block_size]",
                "blocks = block_table[row, (positions - first) // block_size]",
            ),
        ),
        "check() is content and every block is where the trace says, but prompts that do not begin at position 0 of a "
        "step (later chunks, what follows a prefix hit) are written over what stood in the first blocks",
        "only prompts that are computed in more than one piece, or behind a prefix hit, go wrong, and whoever shares "
        "blocks with them; short prompts of their own are right, copies too",
        "The slots of a chunk were counted from the beginning of the chunk, not of the sequence. The second chunk of a "
        "prompt overwrites the first blocks and leaves its own as they were.",
    ),
    Fault(
        "missing salt",
        "simulated",
        (
            Edit(
                "labkit.memory.prefix_cache:PrefixCache._hash",
                "salt if parent is None else parent.chain_hash",
                "0 if parent is None else parent.chain_hash",
            ),
            Edit("labkit.memory.prefix_cache:PrefixCache._holds", " and entry.salt == salt", ""),
        ),
        "all tokens are right; the trace shows a request of one tenant sharing blocks of another",
        "check() is content and every output is right; what differs is who shares blocks with whom",
        "Equal tokens give equal K and V, so no answer is wrong. But a tenant can find out what another one asked: its "
        "first token comes sooner if somebody else's prompt began alike.",
    ),
    Fault(
        "hash without token check",
        "simulated",
        (
            Edit(
                "labkit.memory.prefix_cache:PrefixCache._holds",
                " and entry.token_ids == tokens",
                "",
            ),
        ),
        "a request shares blocks with one whose prompt is another, and gives wrong tokens from the first one on",
        "check() is content; one request is wrong from its first token on, and the trace shows whose blocks it shares: "
        "compare the two prompts",
        "A hash only nominates a block. Two prompts with equal hashes then share K and V. The lab's short hash makes "
        "that happen at once; with a hash of 64 bits it takes chance, or somebody who looks for a collision.",
    ),
    Fault(
        "scale left behind",
        "tiny Llama, int8 KV cache",
        (
            Edit(
                "labkit.engine.kv_storage:KVStorage.copy_blocks",
                "for tensor in self.tensors():",
                "for tensor in (side.codes for pages in self._pages.values() for side in (pages.k, pages.v)):",
            ),
        ),
        "check() is content; only a sequence whose block was copied (BlockCopied in the trace) goes wrong, and only in "
        "a quantised cache",
        "check() is content; of two sequences that were forked from one prompt, the one that wrote first, and so got a "
        "copy of the block, goes wrong; nobody else does",
        "The codes of a block were copied without their scales, so the copy is read with the scales of whoever had "
        "that block before. What is needed to read a block must travel with it.",
    ),
    Fault(
        "off-by-one at a block edge",
        "tiny Llama",
        (
            Edit(
                "labkit.memory.kv_cache_manager:KVCacheManager.match_prefix",
                "(len(token_ids) - 1) // self.block_size",
                "len(token_ids) // self.block_size",
            ),
        ),
        "only a request whose length is a whole number of blocks shows anything",
        "check() is content and no token is wrong, but one request never gets its first one: look at its length",
        "A prompt that fills its blocks exactly and is cached whole has no token left to compute, so there are no "
        "logits to draw its first token from. It holds its blocks and waits for ever. One token must be left.",
    ),
    Fault(
        "stale NaN",
        "tiny Llama",
        (
            Edit(
                "labkit.engine.torch_attention:TorchPagedAttention.write",
                "pages.index_fill_(0, self._fresh_blocks, 0)",
                "pass",
            ),
        ),
        "what is computed one token at a time turns to 0, the argmax of NaN, except in the steps in which the last "
        "block of a sequence is full",
        "check() is content; first tokens are mostly right and later ones mostly 0",
        "The slots behind a sequence's end are masked: their weight is 0. But memory that was never written can hold "
        "NaN, and 0 x NaN is NaN. A block must be cleared before its first token is written, or never read there.",
    ),
)
