"""What can happen to blocks and requests: the vocabulary of a trace.

Events come in bulk (one event for all blocks that a call touched) and a step's events travel together in one
:class:`StepRecord`, so recording costs little. Everything that a figure or widget shows is derived from these.
"""

from __future__ import annotations

from typing import NamedTuple


class BlocksAllocated(NamedTuple):
    """Fresh blocks joined a request's block table at ``first_index``; their ``ref_cnt`` is 1.

    They take the place of whatever stood there: a contiguous run that moves leaves its unwritten end behind.
    """

    request_id: str
    first_index: int
    block_ids: tuple[int, ...]


class BlocksShared(NamedTuple):
    """Blocks that already hold this request's tokens joined its table: ``ref_cnt`` went up by one.

    ``num_tokens`` of the request are computed without running the model: a prefix cache hit, or a fork.
    """

    request_id: str
    first_index: int
    block_ids: tuple[int, ...]
    num_tokens: int


class BlockCopied(NamedTuple):
    """Copy on write: at ``index`` of the request's table ``dst`` took the place of the shared block ``src``."""

    request_id: str
    index: int
    src: int
    dst: int


class BlocksFreed(NamedTuple):
    """A request let go of all its blocks, given in the order of its table: ``ref_cnt`` of each went down by one."""

    request_id: str
    block_ids: tuple[int, ...]


class BlocksCached(NamedTuple):
    """Full blocks became findable in the prefix cache."""

    block_ids: tuple[int, ...]


class BlocksEvicted(NamedTuple):
    """Blocks lost their place in the prefix cache because they were needed for something else."""

    block_ids: tuple[int, ...]


class BlocksSwappedOut(NamedTuple):
    """Copies of a preempted request's computed blocks to host memory began; :class:`BlocksFreed` follows.

    The blocks are in flight, that is not free even if no table holds them, until :class:`BlocksLanded` names them.
    """

    request_id: str
    block_ids: tuple[int, ...]
    host_block_ids: tuple[int, ...]


class BlocksSwappedIn(NamedTuple):
    """Copies from host memory to the blocks of a request's table from ``first_index`` on began.

    Then the request's first ``num_tokens`` tokens are computed; it runs when the copies have landed.
    """

    request_id: str
    first_index: int
    block_ids: tuple[int, ...]
    host_block_ids: tuple[int, ...]
    num_tokens: int


class BlocksLanded(NamedTuple):
    """Copies ended that read or wrote these blocks."""

    block_ids: tuple[int, ...]


class RequestArrived(NamedTuple):
    """A request was accepted at ``time`` (seconds on the executor's clock)."""

    request_id: str
    num_prompt_tokens: int
    time: float


class RequestPreempted(NamedTuple):
    """A running request lost its blocks to others and waits: to be swapped in, or else to be computed again."""

    request_id: str


class RequestFinished(NamedTuple):
    """A request ended; ``reason`` is stop, length, abort or error."""

    request_id: str
    reason: str
    num_output_tokens: int


Event = (
    BlocksAllocated
    | BlocksShared
    | BlockCopied
    | BlocksFreed
    | BlocksCached
    | BlocksEvicted
    | BlocksSwappedOut
    | BlocksSwappedIn
    | BlocksLanded
    | RequestArrived
    | RequestPreempted
    | RequestFinished
)


class StepRecord(NamedTuple):
    """One engine step: who ran, for how many tokens, and everything that happened to blocks and requests.

    ``scheduled_ids[i]`` had ``num_scheduled_tokens[i]`` tokens computed. ``sampled_ids`` lists the requests that
    got a new token. ``start`` and ``end`` are seconds on the executor's clock. Events before the forward pass
    (allocation, sharing, copies) and after it (caching, finishing, freeing) stand in order of occurrence;
    ``num_events_before`` of them came before.
    """

    step: int
    start: float
    end: float
    scheduled_ids: tuple[str, ...]
    num_scheduled_tokens: tuple[int, ...]
    sampled_ids: tuple[str, ...]
    num_running: int
    num_waiting: int
    num_events_before: int
    events: tuple[Event, ...]
