"""The block table widget as Python sees it: what it sends to a browser, when, and what it shows without one."""

from __future__ import annotations

import re
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest

from labkit.core import Engine
from labkit.memory import ContiguousKVManager, KVCacheManager, reserve_max
from labkit.observe import (
    BlocksAllocated,
    BlocksFreed,
    BlocksLanded,
    BlocksSwappedOut,
    BlockTableState,
    StepRecord,
    Trace,
)
from labkit.scheduling import Request, SamplingParams, Scheduler, SchedulerConfig
from labkit.simulation import SimulatedExecutor
from labkit.widgets import BlockTable, block_recording
from labkit.widgets.block_cells import CellState
from labkit.widgets.palette import OKABE_ITO, request_styles


def new_engine(num_requests: int) -> Engine:
    """Requests of 20 to 39 prompt tokens of which 16 are the same, with 12 new tokens each."""
    scheduler = Scheduler(SchedulerConfig(8, 64, 200), KVCacheManager(32, 16))
    engine = Engine(scheduler, SimulatedExecutor(lambda plan: 0.05), Trace(32, 16))
    for i in range(num_requests):
        prompt = [*range(16), *range(100 * i, 100 * i + 4 + i % 20)]
        engine.add_request(Request(f"r{i}", prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
    return engine


def run(engine: Engine):
    while engine.has_unfinished:
        yield engine.step()


def finished(num_requests: int = 6) -> Engine:
    engine = new_engine(num_requests)
    for _ in run(engine):
        pass
    return engine


def cells_of(state: BlockTableState, request_ids: list[str]) -> list[tuple[int, int, int]]:
    views = [state.block(block_id) for block_id in range(state.num_blocks)]
    return [
        (
            0 if view.request_id is None else request_ids.index(view.request_id) + 1,
            view.logical_index,
            view.num_tokens | view.ref_cnt << 16 | view.is_in_flight << 30 | view.is_cached << 31,
        )
        for view in views
    ]


def columns(packed: bytes, count: int) -> np.ndarray:
    return np.frombuffer(zlib.decompress(packed), "<u4").reshape(count, -1)


class Frames:
    """Counts what is sent to the browser, under a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.sent = 100.0, []
        monkeypatch.setattr("labkit.widgets.block_table.time.monotonic", lambda: self.now)

    def watch(self, table: BlockTable) -> None:
        table.observe(lambda change: self.sent.append(change.new), "status")


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    return Frames(monkeypatch)


# ---------------------------------------------------------------------- player


@pytest.mark.parametrize("every", [1, 3])
def test_a_player_gets_the_cells_of_every_shown_step(every: int):
    trace = finished().trace
    assert trace is not None
    table = BlockTable.from_trace(trace, every)
    changes, steps = columns(table.tracks[0]["changes"], 4), columns(table.tracks[0]["steps"], 7)
    shown = [n for n in range(1, len(trace) + 1) if n % every == 0 or n == len(trace)]
    assert list(steps[1]) == shown

    state, cells, row = BlockTableState(trace.num_blocks, trace.block_size), np.zeros((32, 3), int), 0
    for number, record in enumerate(trace, 1):
        state.apply(record)
        if number not in shown:
            continue
        end, _, milliseconds, running, waiting, referenced, _ = steps[:, shown.index(number)]
        for block_id, *words in changes[:, row:end].T:
            cells[block_id] = words
        row = end
        assert [tuple(cell) for cell in cells.tolist()] == cells_of(state, table.request_ids)
        assert (running, waiting) == (record.num_running, record.num_waiting)
        assert referenced == state.num_referenced_blocks
        assert milliseconds == round(1000 * (record.end - trace.steps[0].start))
    assert row == changes.shape[1]


def test_a_players_still_picture_is_the_fullest_step():
    trace = finished().trace
    assert trace is not None
    state, most, step = BlockTableState(32, 16), 0, 0
    for number, record in enumerate(trace, 1):
        state.apply(record)
        if state.num_referenced_blocks > most:
            most, step = state.num_referenced_blocks, number
    text = repr(BlockTable.from_trace(trace))
    assert f"step {step} of {len(trace)}, the fullest: {most} of 32 blocks in use" in text


def test_what_a_player_cannot_show_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="no steps"):
        BlockTable.from_trace(Trace(8, 16))
    trace = finished().trace
    assert trace is not None
    with pytest.raises(ValueError, match="every must be >= 1, got 0"):
        BlockTable.from_trace(trace, every=0)
    monkeypatch.setattr(block_recording, "MAX_CHANGES", 10)
    with pytest.raises(ValueError, match=r"more than 10 .* raise every \(now 1\)"):
        BlockTable.from_trace(trace)


def test_a_block_size_that_no_cell_can_hold_is_refused():
    with pytest.raises(ValueError, match="block_size must be 1 to 65535 to be drawn, got 65536"):
        CellState(8, 65536)


def sharers_after(table: BlockTable, position: int, at: int = 0) -> dict[int, set[str]]:
    """Who holds the shared blocks after a shown step, from what the browser gets."""
    sharers: dict[int, set[str]] = {}
    for step, block, request in columns(table.tracks[at]["sharing"], 3).T.tolist():
        if step > position:
            break
        name = table.request_ids[(request & 0x7FFFFFFF) - 1]
        if request >> 31:
            sharers[block].remove(name)
        else:
            sharers.setdefault(block, set()).add(name)
    return {block: names for block, names in sharers.items() if names}


@pytest.mark.parametrize("every", [1, 4])
def test_a_player_knows_who_shares_each_block(every: int):
    trace = finished().trace
    assert trace is not None
    table, state, position, most = BlockTable.from_trace(trace, every), BlockTableState(32, 16), 0, 0
    for number, record in enumerate(trace, 1):
        state.apply(record)
        if number % every and number != len(trace):
            continue
        position += 1
        held = {block: set(state.holders(block)) for block in range(32)}
        shared = {block: names for block, names in held.items() if len(names) > 1}
        assert sharers_after(table, position) == shared
        most = max(most, *map(len, shared.values()), 0)
    assert most == 3, "those that came after the first block was computed"


def test_a_player_knows_what_happened_in_each_step():
    scheduler = Scheduler(SchedulerConfig(8, 64, 36, watermark=0), KVCacheManager(9, 4))
    engine = Engine(scheduler, SimulatedExecutor(), Trace(9, 4))
    for i in range(3):
        params = SamplingParams(max_tokens=12, ignore_eos=True, n=2 if i == 0 else 1)
        engine.add_request(Request(f"r{i}", [i] * 6, params))
    for _ in run(engine):
        pass
    trace = engine.trace
    assert trace is not None
    table = BlockTable.from_trace(trace)
    masks = columns(table.tracks[0]["steps"], 7)[6]
    for bit, name in enumerate(table.events):
        kinds = block_recording.EVENTS[name]
        happened = [any(isinstance(event, kinds) for event in record.events) for record in trace]
        assert list((masks >> bit & 1) == 1) == happened
        assert any(happened) == (name != "swap"), name


def test_traces_side_by_side_give_a_request_one_colour():
    one, other = finished(6).trace, finished(8).trace
    table = BlockTable.compare({"six": one, "eight": other})
    assert [track["title"] for track in table.tracks] == ["six", "eight"]
    assert len(table.request_ids) == len(set(table.request_ids)) == 8
    changes = columns(table.tracks[1]["changes"], 4)
    assert changes[1].max() == 8
    assert repr(table).count("32 blocks of 16 tokens; ") == 2 and "; six, step " in repr(table)
    assert len(ElementTree.fromstring(table.to_svg()).findall("{*}g")) == 2
    with pytest.raises(ValueError, match="at least one trace, got none"):
        BlockTable.compare({})


def test_runs_of_contiguous_allocators_are_joined():
    scheduler = Scheduler(SchedulerConfig(8, 64, 64), ContiguousKVManager(16, 16, reserve_max(64)))
    engine = Engine(scheduler, SimulatedExecutor(), Trace(16, 16))
    for i in range(3):
        engine.add_request(Request(f"r{i}", [i] * 20, SamplingParams(max_tokens=12, ignore_eos=True)))
    for _ in run(engine):
        pass
    arena = BlockTable.from_trace(engine.trace)
    assert arena.tracks[0]["is_arena"] and not BlockTable.from_trace(finished().trace).tracks[0]["is_arena"]
    assert "M0 0h36v35h-36z" in arena.to_svg(), "the first of a run reaches to the next block"


# ---------------------------------------------------------------------- live


def test_a_live_table_ends_with_the_last_state():
    engine = new_engine(6)
    table = BlockTable.live(engine)
    assert len(list(table.watch(run(engine)))) == engine.stats.num_steps
    state = BlockTableState(32, 16)
    assert engine.trace is not None
    for record in engine.trace:
        state.apply(record)
    assert np.frombuffer(table.cells, "<u4").reshape(-1, 3).tolist() == [
        list(cell) for cell in cells_of(state, table.request_ids)
    ]
    assert table.status == [len(engine.trace), 0, 0]


def test_a_live_table_knows_who_shares_each_block():
    engine = new_engine(6)
    table = BlockTable.live(engine)
    for _ in zip(range(5), run(engine), strict=False):
        pass
    table.update()
    table.flush()
    pairs = np.frombuffer(table.sharers, "<u4").reshape(-1, 2).tolist()
    assert pairs and {block for block, _ in pairs} == {0}
    assert {table.request_ids[request - 1] for _, request in pairs} <= {f"r{i}" for i in range(6)}


def test_frames_are_at_most_thirty_a_second_and_the_last_is_never_lost(frames: Frames):
    engine = new_engine(6)
    table = BlockTable.live(engine)
    frames.watch(table)
    for _ in table.watch(run(engine)):
        frames.now += 0.01
    assert engine.trace is not None
    assert 3 < len(frames.sent) <= len(engine.trace) * 0.01 * 30 + 1
    assert frames.sent[-1] == [len(engine.trace), 0, 0]


def test_large_pools_get_fewer_frames(frames: Frames):
    table = BlockTable(65_536, 16)
    frames.watch(table)
    trace = finished().trace
    assert trace is not None
    for record in trace.steps[:10]:
        table.apply(record)
        frames.now += 0.04
    assert 3 <= len(frames.sent) <= 4, "786,432 bytes a frame, 8 MB a second: a frame each 0.1 s"


def test_leaving_the_loop_early_ends_the_run_and_shows_what_is_left():
    engine = new_engine(6)
    table = BlockTable.live(engine)

    def outputs():
        try:
            yield from run(engine)
        finally:
            for i in range(6):
                engine.abort(f"r{i}")

    watching = table.watch(outputs())
    for _ in zip(range(4), watching, strict=False):
        pass
    watching.close()
    assert not engine.has_unfinished
    assert "0 of 32 blocks in use" in repr(table)
    assert table.status[1:] == [0, 0]


def test_an_error_in_the_run_reaches_the_caller_after_the_last_frame():
    engine = new_engine(3)
    table = BlockTable.live(engine)

    def outputs():
        yield engine.step()
        engine.step()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        list(table.watch(outputs()))
    assert table.status[0] == 2


def test_a_table_made_late_shows_what_happened_before():
    engine = finished()
    table = BlockTable.live(engine)
    assert engine.trace is not None
    assert table.status == [len(engine.trace), 0, 0]
    assert "r0" in table.request_ids


def test_nothing_to_follow_is_an_error():
    engine = Engine(Scheduler(SchedulerConfig(8, 64, 100), KVCacheManager(8, 16)), SimulatedExecutor())
    with pytest.raises(ValueError, match="Engine records no trace"):
        BlockTable.live(engine)
    with pytest.raises(ValueError, match="follows no engine"):
        BlockTable(8, 16).update()


# ---------------------------------------------------------------------- without a browser


def test_text_and_picture_stand_beside_the_widget():
    bundle = BlockTable.live(finished())._repr_mimebundle_()
    assert bundle is not None
    data, _ = bundle
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/plain"].startswith("BlockTable(32 blocks of 16 tokens; step ")
    assert "0x" not in data["text/plain"]
    assert ElementTree.fromstring(data["image/svg+xml"]).tag.endswith("svg")


def test_the_picture_has_a_colour_for_each_state():
    engine = new_engine(2)
    table = BlockTable.live(engine)
    for _ in zip(range(2), table.watch(run(engine)), strict=False):
        pass
    svg = table.to_svg()
    first, second = OKABE_ITO[:2]
    assert f'fill="{first}"' in svg and f'fill="{second}"' in svg, "two requests hold blocks"
    for _ in table.watch(run(engine)):
        pass
    svg = table.to_svg()
    assert f'fill="{first}66"' in svg, "what they left in the prefix cache is pale"
    assert f'<path fill="{first}"' not in svg


def test_blocks_in_flight_to_host_memory_are_neither_free_nor_cached():
    table = BlockTable(8, 16)
    events = (
        BlocksAllocated("a", 0, (0, 1)),
        BlocksSwappedOut("a", (0, 1), (5, 6)),
        BlocksFreed("a", (0, 1)),
    )
    table.apply(StepRecord(0, 0.0, 0.1, (), (), (), 0, 1, len(events), events))
    table.flush()
    words = np.frombuffer(table.cells, "<u4").reshape(-1, 3)[:, 2]
    assert list(words >> 30 & 1) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert "0 of 8 blocks in use" in repr(table) and "2 in flight, 6 free" in repr(table)
    table.apply(StepRecord(1, 0.1, 0.2, (), (), (), 0, 1, 1, (BlocksLanded((0, 1)),)))
    assert repr(table).endswith("8 free)")


@pytest.mark.parametrize("num_blocks", [1, 8, 1000, 16_384, 65_536])
def test_pictures_of_all_sizes_stay_small(num_blocks: int):
    svg = BlockTable(num_blocks, 16).to_svg()
    ElementTree.fromstring(svg)
    assert len(svg) < 400_000


def test_styles_tell_28_requests_apart():
    styles = [(style["fill"], style["hatch"]) for style in request_styles()]
    assert len(set(styles)) == len(styles) == 28
    assert [fill for fill, _ in styles[:7]] == list(OKABE_ITO)


def test_the_script_is_one_module():
    script = str(BlockTable._esm)
    assert script.count("export default") == 1 and "import " not in script
    declared = re.findall(r"^(?:async )?(?:const|function|class) (\w+)", script, re.MULTILINE)
    assert len(declared) == len(set(declared)), "files that are joined share one scope"
