"""Trace files: what is written is read back, a broken end costs little, and strangers are refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.observe import BlocksAllocated, Event, RequestArrived, StepRecord, Trace
from labkit.observe.trace import _EVENTS, STEPS_PER_FLUSH, VERSION

names = st.text(max_size=6)
ints = st.integers(0, 2**40)
floats = st.floats(allow_nan=False, allow_infinity=False)
int_tuples = st.lists(ints, max_size=4).map(tuple)
FIELDS = {"request_id": names, "reason": names, "block_ids": int_tuples, "time": floats}
events = st.one_of([st.builds(cls, **{f: FIELDS.get(f, ints) for f in cls._fields}) for cls in get_args(Event)])


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    scheduled = draw(st.dictionaries(names, ints, max_size=3))
    listed = draw(st.lists(events, max_size=5))
    return StepRecord(
        step=draw(ints),
        start=draw(floats),
        end=draw(floats),
        scheduled_ids=tuple(scheduled),
        num_scheduled_tokens=tuple(scheduled.values()),
        sampled_ids=tuple(draw(st.lists(names, max_size=3))),
        num_running=draw(ints),
        num_waiting=draw(ints),
        num_events_before=draw(st.integers(0, len(listed))),
        events=tuple(listed),
    )


def step(number: int, *happened: Event, ids: tuple[str, ...] = ("a", "b")) -> StepRecord:
    return StepRecord(number, number, number + 0.5, ids, (1,) * len(ids), ids, len(ids), 0, 0, happened)


def types_of(value: object) -> object:
    """Types all the way down: equal tuples could be named tuples of different classes, or hold lists."""
    return (type(value), [types_of(v) for v in value]) if isinstance(value, tuple | list) else type(value)


def test_every_kind_of_event_has_a_name_in_the_file():
    assert set(_EVENTS.values()) == set(get_args(Event))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(records(), max_size=6), streamed=st.booleans())
def test_what_is_written_is_read_back(tmp_path: Path, steps: list[StepRecord], streamed: bool):
    path = tmp_path / "run.trace.gz"
    trace = Trace(64, 16, path=path if streamed else None, model="m", device={"name": "cpu"})
    for one in steps:
        trace.record(one)
    trace.close() if streamed else trace.save(path)
    loaded = Trace.load(path)
    assert list(loaded) == list(trace) == steps
    assert types_of(tuple(loaded)) == types_of(tuple(steps))
    assert (loaded.num_blocks, loaded.block_size, loaded.meta) == (64, 16, {"model": "m", "device": {"name": "cpu"}})
    assert not loaded.is_truncated


def test_a_broken_end_gives_the_steps_that_are_whole(tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trace = Trace(64, 16)
    for i in range(3000):
        trace.record(
            step(i, BlocksAllocated("a", i, (i * 7919 % 64, i % 13)), RequestArrived(f"r{i * 31337}", i, i / 7))
        )
    trace.save(whole)
    content = whole.read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    loaded = Trace.load(broken)
    assert loaded.is_truncated
    assert 0 < len(loaded) < 3000
    assert loaded.steps == trace.steps[: len(loaded)]


def test_a_crash_loses_few_steps(tmp_path: Path):
    """The process ends without closing the file or running any clean-up."""
    path = tmp_path / "crash"
    code = f"""
import os
from labkit.observe import StepRecord, Trace
trace = Trace(64, 16, path={str(path)!r})
for i in range(1000):
    trace.record(StepRecord(i, i, i, ("a",), (1,), ("a",), 1, 0, 0, ()))
os._exit(1)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1
    loaded = Trace.load(path)
    assert loaded.is_truncated
    assert len(loaded) > 1000 - STEPS_PER_FLUSH


def test_a_crash_before_the_first_step_leaves_a_readable_file(tmp_path: Path):
    trace = Trace(64, 16, path=tmp_path / "run")
    assert len(Trace.load(tmp_path / "run")) == 0
    trace.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", gzip.compress(b""), gzip.compress(b"[1]\n"), gzip.compress(b'{"format": "other"}\n')],
    ids=["empty", "not gzip", "gzip of nothing", "no object", "another format"],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "thing"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="thing is not a labkit trace"):
        Trace.load(path)


@pytest.mark.parametrize("header", [{}, {"version": 1}, {"version": 1, "num_blocks": 4, "block_size": 16, "meta": 3}])
def test_a_header_with_parts_missing_is_refused(tmp_path: Path, header: dict):
    path = tmp_path / "thing"
    path.write_bytes(gzip.compress(json.dumps({"format": "labkit-trace"} | header).encode()))
    with pytest.raises(ValueError, match="thing is not a labkit trace"):
        Trace.load(path)


def test_a_newer_version_is_refused_by_number(tmp_path: Path):
    path = tmp_path / "new"
    header = {"format": "labkit-trace", "version": VERSION + 1, "num_blocks": 4, "block_size": 16, "meta": {}}
    path.write_bytes(gzip.compress(json.dumps(header).encode()))
    with pytest.raises(ValueError, match=f"version {VERSION + 1}; this labkit reads up to {VERSION}"):
        Trace.load(path)


def test_a_missing_file_says_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "nowhere")


@pytest.mark.parametrize("line", [b"{}\n", b"3\n", b'{"events": [["explode", 1]]}\n'])
def test_a_line_that_is_no_step_ends_the_trace_there(tmp_path: Path, line: bytes):
    path = tmp_path / "run"
    trace = Trace(4, 16)
    trace.record(step(0))
    trace.save(path)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + line))
    loaded = Trace.load(path)
    assert loaded.steps == trace.steps and loaded.is_truncated


def test_unchanged_columns_are_kept_once_in_memory_and_after_loading(tmp_path: Path):
    trace = Trace(64, 16)
    for i in range(3):
        trace.record(step(i, ids=tuple(f"r{k}" for k in range(8))))
    trace.save(tmp_path / "run")
    for steps in (trace.steps, Trace.load(tmp_path / "run").steps):
        assert steps[0].scheduled_ids is steps[2].scheduled_ids
        assert steps[0].num_scheduled_tokens is steps[2].num_scheduled_tokens


def test_a_steady_decode_of_256_requests_is_small(tmp_path: Path):
    """Names and counts that repeat cost nothing more: a step fits 400 bytes in memory and 20 in the file."""
    trace = Trace(4096, 16)
    tracemalloc.start()
    for i in range(2000):
        trace.record(step(i, ids=tuple(f"request-{k}" for k in range(256))))
    per_step = tracemalloc.get_traced_memory()[0] / 2000
    tracemalloc.stop()
    trace.save(tmp_path / "run")
    assert per_step < 400
    assert (tmp_path / "run").stat().st_size / 2000 < 20
