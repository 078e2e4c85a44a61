"""Workloads: arrivals, lengths, trace files, and the requests made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from labkit.memory import KVCacheManager
from labkit.scheduling import Scheduler, SchedulerConfig
from labkit.simulation import (
    LengthTable,
    SimulatedExecutor,
    TimedLengths,
    Workload,
    all_at_once,
    gamma_arrivals,
    hashed_prompts,
    make_requests,
    poisson_arrivals,
    random_prompts,
    read_azure_csv,
    read_burstgpt_csv,
    read_mooncake_jsonl,
    read_trace,
    sample_workload,
    simulate,
)


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_spread_asked_for(cv: float) -> None:
    times = gamma_arrivals(100_000, rate=5.0, cv=cv, rng=1)
    gaps = np.diff(times, prepend=0)
    assert gaps.min() >= 0
    assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    times = poisson_arrivals(50_000, rate=10.0, rng=2)
    counts = np.bincount(times.astype(int))[:-1]  # the last second is cut short
    assert counts.var() / counts.mean() == pytest.approx(1.0, rel=0.1)
    assert np.array_equal(times, poisson_arrivals(50_000, rate=10.0, rng=2))


def test_a_sampled_workload_runs_in_the_simulator_with_exactly_its_lengths() -> None:
    table = LengthTable.load("azure_conv")
    workload = sample_workload(table, poisson_arrivals(60, rate=50.0, rng=1), rng=2).fitting(2048).first(30)
    assert len(workload) == 30 and workload.num_total_tokens.max() <= 2048
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=2048), KVCacheManager(2048, 16)
    )
    requests = list(make_requests(workload))
    simulate(requests, scheduler, SimulatedExecutor(step_cost=lambda plan: 0.01))
    assert [r.num_prompt_tokens for r in requests] == workload.num_prompt_tokens.tolist()
    assert [len(r.token_ids) for r in requests] == workload.num_total_tokens.tolist()


def test_prompts_have_their_lengths_and_stay_within_the_vocabulary() -> None:
    workload = Workload(all_at_once(3), np.array([5, 1, 300]), np.array([1, 1, 1]))
    prompts = list(random_prompts(workload, vocab_size=7, rng=0))
    assert [len(p) for p in prompts] == [5, 1, 300]
    assert set(prompts[2]) == set(range(7)) and isinstance(prompts[0][0], int)
    assert list(workload) == [TimedLengths(0.0, 5, 1), TimedLengths(0.0, 1, 1), TimedLengths(0.0, 300, 1)]


def test_azure_files(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n",
        encoding="utf-8",
    )
    assert list(read_azure_csv(path)) == [(0.0, 374, 44), (pytest.approx(4.314579), 396, 109)]


def test_mooncake_files(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 2500, "input_length": 10, "output_length": 0, "hash_ids": [40000]}\n'
        '{"timestamp": 0, "input_length": 1000, "output_length": 500, "hash_ids": [0, 1]}\n'
        '{"timestamp": 2600, "input_length": 1025, "output_length": 1, "hash_ids": [0, 1, 9]}\n',
        encoding="utf-8",
    )
    workload = read_mooncake_jsonl(path)
    assert list(workload) == [(0.0, 1000, 500), (2.5, 10, 1), (2.6, 1025, 1)]
    assert workload.hash_ids == ((0, 1), (40000,), (0, 1, 9))
    first, alone, longer = hashed_prompts(workload, vocab_size=32_000)
    assert [len(first), len(alone), len(longer)] == [1000, 10, 1025]
    assert longer[:1000] == first and longer[:10] != alone
    assert all(0 <= token < 32_000 for token in (*first, *alone, *longer))
    assert [r.prompt_token_ids for r in make_requests(workload)] == [first, alone, longer]
    assert workload.fitting(1100).hash_ids == ((40000,), (0, 1, 9))


def test_different_hash_ids_never_give_the_same_tokens() -> None:
    ids = tuple((i,) for i in range(49))
    workload = Workload(np.zeros(49), np.full(49, 512), np.ones(49), ids)
    assert len({tuple(prompt) for prompt in hashed_prompts(workload, vocab_size=7)}) == 49
    with pytest.raises(ValueError, match=r"hash_ids must be < vocab_size squared \(36\), got 36"):
        list(hashed_prompts(workload, vocab_size=6))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,"
MOONCAKE = '{"timestamp": 0, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]}\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AZURE + "44\n", (0.0, 374, 44)),
        (MOONCAKE, (0.0, 1025, 5)),
        ("Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n", (0.0, 472, 18)),
        ("num_prefill_tokens,num_decode_tokens,pd_ratio\n3772,54,70\n", (0.0, 3772, 54)),
    ],
)
def test_a_trace_is_known_by_its_first_line(text: str, expected: tuple, tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    path.write_text(text, encoding="utf-8")
    assert list(read_trace(path)) == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE + "many\n", "line 2: GeneratedTokens must be a number or time, got 'many'"),
        (AZURE.replace("2023", "soon"), "line 2: TIMESTAMP must be a number or time, got 'soon"),
        (MOONCAKE + "{broken\n", "no Mooncake trace: line 2 is '{broken'"),
        (MOONCAKE.replace("input_length", "length"), "no Mooncake trace: line 1 has no input_length"),
        (MOONCAKE.replace("1025", "1024"), r"line 1: a prompt of 1024 tokens must have 2 hash_ids, got 3"),
        ("a,b\n1,2\n", "is no trace that labkit knows: .* got 'a,b'"),
        ("", "is no trace that labkit knows"),
    ],
)
def test_bad_trace_files_say_where_and_what(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_burstgpt_files_without_their_failed_requests(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n",
        encoding="utf-8",
    )
    assert list(read_burstgpt_csv(path)) == [(0.0, 472, 18), (113.0, 417, 276)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: read_azure_csv(p), "has no column TIMESTAMP, ContextTokens, GeneratedTokens; it has a, b"),
        (lambda p: poisson_arrivals(5, rate=0), "rate must be > 0 and finite, got 0"),
        (lambda p: gamma_arrivals(5, rate=1, cv=-1), "cv must be > 0 and finite, got -1"),
        (lambda p: all_at_once(-1), "num_requests must be >= 0, got -1"),
        (lambda p: Workload(np.array([1.0, 0.5]), np.ones(2), np.ones(2)), "arrival_times must be .* never falls"),
        (lambda p: Workload(np.zeros(2), np.array([1, 0]), np.ones(2)), "num_prompt_tokens must be >= 1, got 0"),
        (lambda p: Workload(np.zeros(2), np.ones(2), np.ones(3)), r"num_output_tokens must have shape \(2,\)"),
        (lambda p: next(random_prompts(Workload(np.zeros(1), np.ones(1), np.ones(1)), 0)), "vocab_size must be >= 1"),
    ],
)
def test_bad_workloads_say_what_is_wrong(call, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        call(path)
