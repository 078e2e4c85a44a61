"""The scenario of the fault lab: eight requests, with everything that can go wrong in it, on a device that remembers.

Blocks hold 4 tokens, a step computes at most 8, and memory is short, so that blocks soon get new owners::

    a     8 tokens that others share, and 2 of its own      computed in two pieces
    b     6 tokens, n = 2                                   forks within a block: copy on write
    c     begins like a                                     prefix cache hit
    d     the prompt of a, under another salt               no hit
    e     the 8 shared tokens, nothing else                 whole blocks
    f     the tokens of a in another order                  the same short hash
    g h   prompts of their own                              take over what others have left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from labkit.core import Engine, Executor
from labkit.memory import CachedBlock, KVCacheManager, PrefixCache
from labkit.observe import Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig, StepPlan
from labkit.simulation import SimulatedExecutor

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, TOKEN_BUDGET, MAX_MODEL_LEN = 20, 4, 8, 8, 48
MAX_STEPS = 60
KINDS = {"simulated": None, "tiny Llama": "auto", "tiny Llama, int8 KV cache": "int8"}
"""Where a scenario runs, and how K and V are stored there."""

SHARED = [11, 12, 13, 14, 15, 16, 17, 18]
REORDERED = [14, 13, 12, 11, 18, 17, 16, 15]


def requests() -> list[tuple[int, Request]]:
    """The requests, each with the step before which it arrives."""

    def request(name: str, prompt: Sequence[int], max_tokens: int, n: int = 1, salt: str | None = None) -> Request:
        temperature = 1.0 if n > 1 else 0.0
        params = SamplingParams(n=n, temperature=temperature, seed=3, max_tokens=max_tokens, ignore_eos=True)
        return Request(name, prompt, params, cache_salt=salt)

    return [
        (0, request("a", [*SHARED, 21, 22], 9)),
        (0, request("b", [31, 32, 33, 34, 35, 36], 9, n=2)),
        (4, request("c", [*SHARED, 41, 42, 43], 12)),
        (5, request("d", [*SHARED, 21, 22], 6, salt="tenant 2")),
        (7, request("e", SHARED, 5)),
        (8, request("f", [*REORDERED, 51], 6)),
        (12, request("g", [61, 62, 63, 64, 65], 9)),
        (14, request("h", [71, 72, 73, 74, 75, 76, 77], 9)),
    ]


class ShortHashes(PrefixCache):
    """A prefix cache whose hashes see only the sum of a block's tokens: collisions come at once, not after years."""

    @staticmethod
    def _hash(parent: CachedBlock | None, tokens: tuple[int, ...], salt: str | None) -> int:
        return PrefixCache._hash(parent, (sum(tokens),), salt)


class RememberingExecutor(SimulatedExecutor):
    """A device without a model that keeps each token in its slot; the next token follows from all that is read.

    So whoever reads a wrong slot says something wrong, as a model would.
    """

    def __init__(self) -> None:
        super().__init__(step_cost=lambda plan: 0.01, next_token=self._said)
        self._slots = [[0] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self._read: dict[str, tuple[int, ...]] = {}

    def submit(self, plan: StepPlan) -> None:
        """Copy blocks, write the step's tokens into their slots, then read every sequence through its block table."""
        copied = [(dst, list(self._slots[src])) for src, dst in plan.copies]
        for dst, tokens in copied:
            self._slots[dst] = tokens
        for request, first, count, block_table, _ in plan.requests:
            for position in range(first, first + count):
                block, offset = block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self._slots[block][offset] = request.token_ids[position]
        for request, first, count, block_table, _ in plan.requests:
            places = range(first + count)
            read = (self._slots[block_table[p // BLOCK_SIZE]][p % BLOCK_SIZE] for p in places)
            self._read[request.request_id] = tuple(read)
        super().submit(plan)

    def _said(self, request: Request, sample_index: int) -> int:
        return 100 + (crc32(repr(self._read[request.request_id]).encode()) + sample_index) % 900


@dataclass(slots=True)
class Outcome:
    """What a run of the scenario shows.

    Attributes:
        requests: each as it was sent, by id.
        outputs: generated tokens of every sequence.
        check: the first complaint of the allocator's check(), with its step; empty if it had none.
        error: what stopped the engine, or which requests never ended; empty if all did.
    """

    trace: Trace
    requests: dict[str, str]
    outputs: dict[str, list[int]] = field(default_factory=dict)
    check: str = ""
    error: str = ""


def play(kind: str) -> Outcome:
    """Run the scenario on a device of ``kind``, with whatever bugs the classes have now."""
    kv_cache_dtype = KINDS[kind]
    if kv_cache_dtype is None:
        return _serve(RememberingExecutor())
    from .faults_model import tiny_llm  # loads torch and transformers

    with tiny_llm(kv_cache_dtype, NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN) as llm:
        return _serve(llm.engine.executor)


def _serve(executor: Executor) -> Outcome:
    kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    kv.blocks.prefix_cache = ShortHashes(BLOCK_SIZE)
    config = SchedulerConfig(MAX_NUM_SEQS, TOKEN_BUDGET, MAX_MODEL_LEN, watermark=0)
    engine = Engine(Scheduler(config, kv), executor, Trace(NUM_BLOCKS, BLOCK_SIZE))
    arrivals = requests()
    assert engine.trace is not None
    outcome = Outcome(engine.trace, {request.request_id: _described(request) for _, request in arrivals})
    sequences = {request.request_id: request for _, request in arrivals}
    for step in range(MAX_STEPS):
        while arrivals and arrivals[0][0] <= step:
            engine.add_request(arrivals.pop(0)[1])
        if not (arrivals or engine.has_unfinished):
            break
        try:
            sequences |= {request.request_id: request for request in engine.step()}
        except Exception as error:
            outcome.error = f"step {len(engine.trace) + 1}: {type(error).__name__}: {error}"
            break
        if not outcome.check:
            outcome.check = _complaint(kv, len(engine.trace))
    else:
        waiting = ", ".join(name for name, request in sequences.items() if request.finish_reason is None)
        outcome.error = f"stopped after {MAX_STEPS} steps: {waiting} never ended"
    outcome.outputs = {name: request.output_token_ids for name, request in sorted(sequences.items())}
    return outcome


def _complaint(kv: KVCacheManager, step: int) -> str:
    try:
        kv.check()
    except AssertionError as error:
        return f"step {step}: {error or 'the counters disagree'}"
    return ""


def _described(request: Request) -> str:
    extras = [f"n={request.sampling_params.n}"] if request.sampling_params.n > 1 else []
    extras += [f"salt {request.cache_salt!r}"] if request.cache_salt else []
    return " ".join(map(str, request.token_ids)) + "".join(f" · {extra}" for extra in extras)
