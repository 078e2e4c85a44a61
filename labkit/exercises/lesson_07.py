"""Exercise of lesson 07: predicting a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from labkit.core import Engine
from labkit.memory import KVCacheManager
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor

from .exercise import Exercise
from .judging import on_all, same


def steps_to_finish(output_lens: Sequence[int], max_num_seqs: int) -> int:
    """Each place takes the next request as soon as it is free; the last place to end decides."""
    places = [0] * max_num_seqs
    for length in output_lens:
        places[places.index(min(places))] += length
    return max(places)


def _measured(output_lens: Sequence[int], max_num_seqs: int) -> int:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=64)
    engine = Engine(Scheduler(config, KVCacheManager(256, 16, enable_prefix_caching=False)), SimulatedExecutor())
    for i, length in enumerate(output_lens):
        engine.add_request(Request(str(i), [1], SamplingParams(max_tokens=length, ignore_eos=True)))
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
    return num_steps


def _judge(attempt: Callable[..., int]) -> None:
    def compare(case: tuple[list[int], int]) -> None:
        same(attempt(*case), _measured(*case), "the number of steps that the real scheduler takes")

    on_all(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4)), compare, num_cases=60)


EXERCISES = (
    Exercise(
        "07-steps",
        "How many steps will it take?",
        "Requests with prompts of one token want output_lens tokens each; at most max_num_seqs run at once, memory "
        "is ample. Write steps_to_finish(output_lens, max_num_seqs): the steps until all have ended. It is compared "
        "with the real scheduler.",
        (
            "A request of n output tokens runs for n steps: the first also computes its prompt.",
            "Whoever waits takes the place that is free first, in order of arrival.",
            "Keep the step at which each place is free again; the largest is the answer.",
        ),
        _judge,
        steps_to_finish,
    ),
)
