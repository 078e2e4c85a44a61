"""Figures show the numbers they were given, on any background, and refuse what cannot be drawn."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest

from labkit.core import Engine
from labkit.figures import arena_map, memory_split, memory_timeline, show, usage_timeline
from labkit.kv_math import GIB
from labkit.memory import ContiguousKVManager, KVCacheManager, reserve_oracle
from labkit.observe import BlocksAllocated, BlocksFreed, BlocksSwappedOut, StepRecord, Trace
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor


def simulated_trace(num_steps: int = 20) -> tuple[Trace, list]:
    """A trace, and the manager's usage after each of its steps."""
    kv, trace, usages = KVCacheManager(32, 4), Trace(32, 4), []
    engine = Engine(Scheduler(SchedulerConfig(8, 64, 120), kv), SimulatedExecutor(), trace)
    for i, length in enumerate((5, 9)):
        params = SamplingParams(max_tokens=num_steps - i, ignore_eos=True)
        engine.add_request(Request(f"r{i}", list(range(i, i + length)), params))
    while engine.has_unfinished:
        engine.step()
        usages.append(kv.usage())
    return trace, usages


def drawn(figure: Any) -> list[Any]:
    """The traces of a figure, whose classes plotly makes at run time."""
    return list(figure.data)


def assert_readable_in_dark(figure: go.Figure) -> None:
    layout = figure.to_dict()["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert layout["font"]["color"] == "#808080"


def test_usage_timeline_is_the_managers_usage_after_each_step():
    trace, usages = simulated_trace()
    figure = usage_timeline(trace)
    by_name = {area.name: list(area.y) for area in drawn(figure)}
    assert by_name["live tokens"] == [usage.num_live_tokens for usage in usages]
    assert by_name["internal fragmentation"] == [usage.num_fragmented_slots for usage in usages]
    assert by_name["cached"] == [usage.num_cached_free_blocks * 4 for usage in usages]
    assert {sum(slots) for slots in zip(*by_name.values(), strict=True)} == {32 * 4}
    assert_readable_in_dark(figure)


def test_blocks_in_flight_have_their_own_area():
    trace = Trace(8, 16)
    events = (
        BlocksAllocated("a", 0, (0, 1)),
        BlocksSwappedOut("a", (0, 1), (5, 6)),
        BlocksFreed("a", (0, 1)),
    )
    trace.record(StepRecord(0, 0.0, 0.1, (), (), (), 0, 1, len(events), events))
    by_name = {area.name: list(area.y) for area in drawn(usage_timeline(trace))}
    assert by_name["in flight"] == [2 * 16] and by_name["free"] == [6 * 16]


def test_a_long_trace_is_thinned_out_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("labkit.figures.usage.MAX_POINTS", 7)
    trace, _ = simulated_trace(20)
    figure = usage_timeline(trace)
    assert list(drawn(figure)[0].x) == [1, 4, 7, 10, 13, 16, 19, 20]
    assert "every 3rd" in figure.to_dict()["layout"]["xaxis"]["title"]["text"]


def test_an_empty_trace_is_refused():
    with pytest.raises(ValueError, match="trace must hold at least one step"):
        usage_timeline(Trace(4, 16))


def test_memory_split_adds_up():
    parts = {"weights": 2 * GIB, "kv_live": GIB // 2, "graphs": 0, "my_own": GIB}
    figure = memory_split(parts)
    assert [bar.x[0] for bar in drawn(figure)] == [2.0, 0.5, 1.0]
    assert [bar.name for bar in drawn(figure)] == ["weights 2.00 GiB", "KV live 512.00 MiB", "my own 1.00 GiB"]
    assert list(figure.to_dict()["layout"]["xaxis"]["range"]) == [0, 3.5]
    assert_readable_in_dark(figure)


@pytest.mark.parametrize("parts", [{"weights": -1}, {"weights": 0}, {}])
def test_memory_split_refuses_what_cannot_be_drawn(parts: dict[str, int]):
    with pytest.raises(ValueError, match="parts must"):
        memory_split(parts)


def test_memory_timeline_leaves_out_what_is_free_or_nothing():
    table = pd.DataFrame(
        {"time": [0.0, 0.5], "total": [8 * GIB] * 2, "weights": [GIB] * 2, "graphs": [0, 0], "kv_live": [0, GIB // 4]}
    ).assign(free=6 * GIB)
    figure = memory_timeline(table)
    assert {area.name: list(area.y) for area in drawn(figure)} == {"weights": [1.0, 1.0], "KV live": [0.0, 0.25]}
    assert_readable_in_dark(figure)
    with pytest.raises(ValueError, match="at least one snapshot"):
        memory_timeline(table.iloc[:0])


def test_show_gives_the_source_without_its_indent():
    text = str(show(KVCacheManager.extend).data)
    assert text.startswith("def extend(self, request_id: str") and "\n    sequence = " in text
    assert str(show(KVCacheManager).data).startswith("class KVCacheManager:")


@pytest.mark.parametrize("part", [3, len])
def test_show_refuses_what_has_no_source(part: object):
    with pytest.raises(TypeError, match="part must be a class, function or module"):
        show(part)


def holed_arena() -> ContiguousKVManager:
    """Twelve blocks: a run of 4, a hole of 3, a run of 2, a hole of 3."""
    kv = ContiguousKVManager(12, 16, reserve_oracle)
    for name, blocks in (("a", 4), ("b", 3), ("c", 2), ("d", 3)):
        assert kv.admit(name, 16 * blocks)
    kv.free("b")
    kv.free("d")
    return kv


def test_arena_map_draws_each_run_and_hole_in_its_place():
    kv = holed_arena()
    taken, holes, wanted = drawn(figure := arena_map(kv, 5))
    assert list(zip(taken.base, taken.x, strict=True)) == [(0, 4), (7, 2)]
    assert list(zip(holes.base, holes.x, strict=True)) == kv.arena.holes == [(4, 3), (9, 3)]
    assert list(wanted.x) == [5] and not kv.admit("e", 16 * 5)
    assert "6 free, at most 3 in a row" in figure.to_dict()["layout"]["title"]["text"]
    assert_readable_in_dark(figure)


@pytest.mark.parametrize("asked", [0, 13])
def test_arena_map_refuses_what_no_arena_could_hold(asked: int):
    with pytest.raises(ValueError, match="asked must be 1 to 12 blocks"):
        arena_map(holed_arena(), asked)
