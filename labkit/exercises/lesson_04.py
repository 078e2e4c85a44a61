"""Exercises of lesson 04: who runs when, and what may be shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from labkit.memory import KVCacheManager
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import RooflineCost, SimulatedExecutor, simulate

from .exercise import Exercise, Failed
from .judging import as_list, close, on_all, same


def busy_share(output_lens: Sequence[int]) -> float:
    """Steps in which a request gets a token, over the steps for which it is held: those of the longest."""
    return sum(output_lens) / (len(output_lens) * max(output_lens))


def _judge_busy_share(attempt: Callable[..., float]) -> None:
    def compare(lens: list[int]) -> None:
        close(attempt(lens), busy_share(lens), "the share")

    on_all(st.lists(st.integers(1, 2000), min_size=1, max_size=8), compare)


def share_budget(budget: int, num_running: int, prompt_lens: Sequence[int]) -> list[int]:
    """One token for each that runs, then prompts in order, the last one cut where the budget ends."""
    left = budget - num_running
    shares = [1] * num_running
    for length in prompt_lens:
        if left == 0:
            break
        shares.append(min(length, left))
        left -= shares[-1]
    return shares


def _judge_share_budget(attempt: Callable[..., list[int]]) -> None:
    def compare(case: tuple[int, int, list[int]]) -> None:
        extra, num_running, prompts = case
        same(
            attempt(num_running + extra, num_running, prompts), share_budget(num_running + extra, num_running, prompts)
        )

    on_all(st.tuples(st.integers(0, 600), st.integers(0, 6), st.lists(st.integers(1, 400), max_size=5)), compare)


def priority(num_prompt_tokens: int, max_tokens: int) -> int:
    """Shortest work first: a request that is soon done should not wait for one that is not."""
    return num_prompt_tokens + max_tokens


def _mean_latency(rule: Callable[[int, int], int]) -> float:
    """Mean seconds from arrival to last token of 60 requests, on the real scheduler and a simulated GPU."""
    requests = []
    for i in range(60):
        prompt, output = (2000, 400) if i % 4 == 0 else (60 + 10 * (i % 7), 20 + i % 5)
        requests.append(
            Request(
                str(i),
                [1] * prompt,
                SamplingParams(max_tokens=output, ignore_eos=True),
                arrival_time=0.02 * i,
                priority=rule(prompt, output),
            )
        )
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=4096)
    seconds = RooflineCost(13_500_000_000, 6_700_000_000, 524_288, 0, 4.6e12, 7e14)
    ends: dict[str, float] = {}

    def note(engine) -> None:
        for request in requests:
            if request.finish_reason and request.request_id not in ends:
                ends[request.request_id] = engine.executor.now()

    scheduler = Scheduler(config, KVCacheManager(4096, 16, enable_prefix_caching=False))
    simulate(requests, scheduler, SimulatedExecutor(seconds), on_step=note)
    return sum(ends[r.request_id] - (r.arrival_time or 0) for r in requests) / len(requests)


def _judge_priority(attempt: Callable[[int, int], int]) -> None:
    value = attempt(10, 5)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Failed(f"a priority is an int, smaller runs earlier; got {value!r}")
    first_come, yours = _mean_latency(lambda prompt, output: 0), _mean_latency(attempt)
    if yours > 0.8 * first_come:
        raise Failed(
            f"mean latency is {yours:.2f} s with your rule and {first_come:.2f} s first come, first served: "
            f"get below {0.8 * first_come:.2f} s"
        )


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str | None = None) -> list[int]:
    """Each full block's hash covers its tokens and the hash of the block before; the salt starts the chain."""
    hashes, parent = [], hash(("salt", salt))
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = hash((parent, tuple(token_ids[end - block_size : end])))
        hashes.append(parent)
    return hashes


def _judge_block_hashes(attempt: Callable[..., list[int]]) -> None:
    def compare(case: tuple[list[int], int, int]) -> None:
        tokens, size, at = case
        hashes = as_list(attempt(tokens, size))
        same(len(hashes), len(tokens) // size, f"the number of hashes of {len(tokens)} tokens in blocks of {size}")
        same(as_list(attempt(tokens, size)), hashes, "the hashes of the same tokens, asked again,")
        changed = [*tokens]
        changed[at % len(tokens)] += 1
        other = as_list(attempt(changed, size))
        first = at % len(tokens) // size
        for i, (a, b) in enumerate(zip(hashes, other, strict=True)):
            if (a == b) != (i < first):
                where = "before" if i < first else "at or after"
                verb = "must not" if i < first else "must"
                raise Failed(f"token {at % len(tokens)} changed: the hash of block {i}, {where} it, {verb} change")
        if hashes and set(as_list(attempt(tokens, size, "a"))) & set(as_list(attempt(tokens, size, "b"))):
            raise Failed("two tenants with different salts must never share a block: the salt is not in every hash")
        if any(a == b for a, b in pairwise(hashes)):
            raise Failed("two blocks of equal tokens at different places must differ: what came before counts")

    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=16)
    on_all(st.tuples(tokens, st.sampled_from([4, 1, 2]), st.integers(0, 15)), compare)


EXERCISES = (
    Exercise(
        "04-busy-share",
        "What static batching wastes",
        "A static batch runs until its longest request ends. Write busy_share(output_lens): the share of its places, "
        "over all its steps, in which a request still gets a token.",
        (
            "How many steps does the batch run, and how many places has it in each?",
            "A request of n output tokens uses its place in n steps.",
            "sum / (number of requests x the longest).",
        ),
        _judge_busy_share,
        busy_share,
    ),
    Exercise(
        "04-share-budget",
        "Sharing a token budget",
        "A step may compute budget tokens. Write share_budget(budget, num_running, prompt_lens) -> list: one token "
        "for each request that decodes, then as many tokens of the waiting prompts, in order, as the budget still "
        "holds; a prompt that does not fit is cut (chunked prefill). Who gets nothing is not in the list. budget >= "
        "num_running.",
        (
            "Take the decodes off the budget first: they must not wait for a long prompt.",
            "Each prompt gets the smaller of its length and what is left.",
            "Stop when nothing is left, before you append a 0.",
        ),
        _judge_share_budget,
        share_budget,
    ),
    Exercise(
        "04-priority",
        "A rule for the queue",
        "The scheduler runs requests in order of priority (smaller first), then of arrival. Write "
        "priority(num_prompt_tokens, max_tokens) -> int. It is tried in the real scheduler on a simulated GPU with "
        "places for 8 requests: every fourth request is 30 times as long as the others. Target: a mean latency at "
        "least 20 % below first come, first served.",
        (
            "Who suffers when a long request is ahead in the queue, and how many are they?",
            "What is soon done frees its place soon.",
            "Shortest work first: the number of tokens to compute is known before a request runs.",
        ),
        _judge_priority,
        priority,
    ),
    Exercise(
        "04-block-hashes",
        "Which blocks are the same",
        "Write block_hashes(token_ids, block_size, salt=None) -> list: one hash for each full block. Two blocks may "
        "be shared only if their tokens and all tokens before them are equal, and the salts too.",
        (
            "K and V of a token depend on all tokens before it. What must a hash cover?",
            "Hash the tokens of a block together with the hash of the block before.",
            "Begin the chain with the salt; leave a last block that is not full out.",
        ),
        _judge_block_hashes,
        block_hashes,
    ),
)
