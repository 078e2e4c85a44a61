"""The live monitor as Python sees it: what it sends and how often, how a run ends, and that nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np
import pytest

from labkit.engine import LLM
from labkit.scheduling import SamplingParams
from labkit.widgets import LiveMonitor

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@pytest.fixture
def llm(tiny_llama) -> Iterator[LLM]:
    with LLM(tiny_llama, block_size=4, num_gpu_blocks_override=64) as llm:
        yield llm


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def slowly(outputs, seconds: float = 0.01):
    for output in outputs:
        yield output
        time.sleep(seconds)


def until(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def monitor_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "labkit-live-monitor"}


def test_an_idle_engine_is_shown_at_once_and_then_left_alone(llm):
    monitor = LiveMonitor(llm)
    assert monitor.status["state"] == "idle" and monitor.status["generated"] == 0
    assert monitor.parts["kv_pool"] == monitor.parts["kv_free"] == llm.memory.kv_pool
    assert sum(monitor.parts[name] for name, _, _ in monitor.bars[0][1]) == llm.memory_monitor().snapshot().total
    sent = []
    monitor.observe(sent.append, "status")
    time.sleep(0.35)
    assert not sent
    monitor.close()


def test_it_follows_what_other_cells_run_at_most_ten_times_a_second(llm):
    monitor, seen = LiveMonitor(llm), []
    monitor.observe(lambda change: seen.append((time.monotonic(), change.new)), "status")
    started = time.monotonic()
    for _ in slowly(llm.stream(PROMPTS, params(40))):
        pass
    until(lambda: monitor.status["state"] == "idle")
    assert 2 <= len(seen) <= (time.monotonic() - started) / 0.1 + 2
    assert any(status["running"] == 2 and status["tokens_per_second"] > 0 for _, status in seen[:-1])
    assert monitor.status["generated"] == 80
    live, held = np.frombuffer(monitor.history, np.uint16).reshape(-1, 2).T
    assert (live <= held).all() and held.max() > 0
    monitor.close()


def test_a_run_in_the_background_gives_what_generate_gives(llm):
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params(12), use_tqdm=False)]
    monitor = LiveMonitor(llm)
    monitor.run(slowly(llm.stream(PROMPTS, params(12))))
    with pytest.raises(RuntimeError, match="the run before has not ended"):
        monitor.run([])
    outputs = monitor.wait()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.finished for output in outputs)
    assert monitor.status["state"] == "idle" and not monitor.status["stoppable"]
    monitor.close()


def test_stop_aborts_what_has_not_finished(llm):
    monitor = LiveMonitor(llm)
    monitor.run(slowly(llm.stream(PROMPTS, params(200))))
    until(lambda: monitor.status["generated"] > 4)
    assert monitor.status["stoppable"]
    monitor._handle_custom_msg("stop", [])  # what the button sends
    assert len(monitor.wait()) == 2
    assert llm.stats.num_generated_tokens < 400 and not llm.has_unfinished()
    assert llm.engine.scheduler.kv.usage().num_referenced_blocks == 0
    monitor.close()


def test_wait_raises_what_the_run_raised_and_without_a_run_gives_nothing(llm):
    monitor = LiveMonitor(llm)
    assert monitor.wait() == []
    monitor.run(1 / zero for zero in [0])
    with pytest.raises(ZeroDivisionError):
        monitor.wait()
    monitor.close()


def test_it_ends_with_the_llm_and_with_close(tiny_llama):
    others = monitor_threads()  # of the tests before: such a thread may end at any moment
    with LLM(tiny_llama, block_size=4, num_gpu_blocks_override=64) as llm:
        monitor, closed = LiveMonitor(llm), LiveMonitor(llm)
        ours = monitor_threads() - others
        assert len(ours) == 2
        closed.close()
        until(lambda: len(ours & monitor_threads()) == 1)
    until(lambda: not ours & monitor_threads())
    assert monitor.status["state"] == "closed"
    with pytest.raises(RuntimeError, match="closed"):
        LiveMonitor(llm)


def test_it_keeps_no_llm_alive(tiny_llama):
    llm = LLM(tiny_llama, block_size=4, num_gpu_blocks_override=64)
    monitor = LiveMonitor(llm)
    del llm
    until(lambda: monitor.status["state"] == "closed")


def test_without_a_browser_there_are_a_picture_and_a_line(llm):
    monitor = LiveMonitor(llm)
    data, _ = monitor._repr_mimebundle_() or ({}, {})
    assert data["text/plain"].startswith("LiveMonitor(cpu; idle: 0 running, 0 waiting, 0 tokens generated; weights ")
    svg = ElementTree.fromstring(data["image/svg+xml"])
    rects = svg.findall("{http://www.w3.org/2000/svg}rect")
    assert len(rects) == sum(len(parts) for _, parts in monitor.bars)
    assert len(data["image/svg+xml"]) < 5000
    monitor.close()


def test_bad_input_is_refused(llm):
    with pytest.raises(ValueError, match="interval must be >= 0.1 seconds, got 0.05"):
        LiveMonitor(llm, interval=0.05)
    with pytest.raises(TypeError, match="llm must be a labkit LLM, got int"):
        LiveMonitor(3)
