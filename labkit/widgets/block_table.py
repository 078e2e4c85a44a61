"""The block pool as a picture: a player for traces, and a live view of an engine."""

from __future__ import annotations

import struct
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anywidget
import traitlets

from labkit.observe import StepRecord, Trace

from .block_cells import CellState
from .block_recording import EVENTS, encode_trace
from .block_svg import StillPool, block_svg
from .esm import joined_modules
from .palette import request_styles

MAX_FRAMES_PER_SECOND = 30
MAX_BYTES_PER_SECOND = 8_000_000
"""Pools of many thousand blocks get fewer frames, so that the picture never slows the engine or the browser."""

Output = TypeVar("Output")


class Traced(Protocol):
    """Something that records a trace: an ``LLM`` or an ``Engine``."""

    @property
    def trace(self) -> Trace | None: ...


class BlockTable(anywidget.AnyWidget):
    """One square a block: coloured by request, filled as high as its tokens, pale when only the cache knows it.

    ::

        BlockTable.from_trace(llm.trace)             # play, pause, scrub; needs no kernel once it is shown

        table = BlockTable.live(llm)                 # follows an engine
        display(table)
        for output in table.watch(llm.stream(prompts, params)):
            ...

    Point at a block, click it, or focus the picture and use the arrow keys, for its request, logical block, tokens and
    ref_cnt. All blocks of its request are outlined; of a shared block, those of all requests that hold it. A player
    has a menu of events to jump to. Runs of contiguous allocators are drawn without gaps.
    """

    _esm = joined_modules(
        Path(__file__).parent, "block_cells.js", "block_paint.js", "block_view.js", "block_player.js", "block_table.js"
    )
    _css = Path(__file__).with_name("block_table.css")

    num_blocks = traitlets.Int().tag(sync=True)
    block_size = traitlets.Int().tag(sync=True)
    styles = traitlets.List().tag(sync=True)
    request_ids = traitlets.List(traitlets.Unicode()).tag(sync=True)
    # A live table: the cells now, pairs (block, request) for shared blocks, [number of the step, running, waiting].
    cells = traitlets.Bytes(b"").tag(sync=True)
    sharers = traitlets.Bytes(b"").tag(sync=True)
    status = traitlets.List(traitlets.Int()).tag(sync=True)
    # A player: for each trace {title, num_blocks, block_size, is_arena, changes, sharing, steps}, see EncodedTrace.
    tracks = traitlets.List(traitlets.Dict()).tag(sync=True)
    events = traitlets.List(traitlets.Unicode(), list(EVENTS)).tag(sync=True)

    def __init__(self, num_blocks: int, block_size: int, **traits: Any) -> None:
        """An empty pool, to be fed with :meth:`apply`. Raises ValueError unless both numbers are >= 1."""
        self._state = CellState(num_blocks, block_size)
        self._trace: Trace | None = None
        self._num_seen = 0
        self._num_applied = 0
        self._last_record: StepRecord | None = None
        self._last_push = float("-inf")
        self._stills: list[StillPool] = []  # of a player
        traits.setdefault("cells", self._state.cells.tobytes())
        traits.setdefault("status", [0, 0, 0])
        super().__init__(num_blocks=num_blocks, block_size=block_size, styles=request_styles(), **traits)

    @classmethod
    def from_trace(cls, trace: Trace, every: int = 1) -> BlockTable:
        """A player for every ``every``-th step of a trace. All of it goes to the browser, once.

        Raises ValueError if the trace is empty, ``every`` < 1, or too much would have to be sent.
        """
        return cls._player({"": trace}, every)

    @classmethod
    def compare(cls, traces: Mapping[str, Trace], every: int = 1) -> BlockTable:
        """Players for several traces, by title, side by side on one clock: seconds since the first step of each.

        A request that is in several has one colour. Raises ValueError as :meth:`from_trace`, and if there is no trace.
        """
        if not traces:
            raise ValueError("traces must hold at least one trace, got none")
        return cls._player(traces, every)

    @classmethod
    def _player(cls, traces: Mapping[str, Trace], every: int) -> BlockTable:
        tracks, stills, request_ids = [], [], []
        for title, trace in traces.items():
            encoded = encode_trace(trace, every, request_ids)
            request_ids = encoded.request_ids
            tracks.append(
                {
                    "title": title,
                    "num_blocks": trace.num_blocks,
                    "block_size": trace.block_size,
                    "is_arena": encoded.is_arena,
                    "changes": encoded.changes,
                    "sharing": encoded.sharing,
                    "steps": encoded.steps,
                }
            )
            caption = f"{title and title + ', '}step {encoded.fullest_step} of {len(trace)}, the fullest"
            stills.append(StillPool(caption, encoded.fullest_cells, encoded.fullest_split, encoded.is_arena))
        first = next(iter(traces.values()))
        table = cls(first.num_blocks, first.block_size, request_ids=request_ids, cells=b"", tracks=tracks)
        table._stills = stills
        return table

    @classmethod
    def live(cls, source: Traced) -> BlockTable:
        """A table that follows an ``LLM`` or ``Engine``; :meth:`watch` or :meth:`update` moves it on.

        Raises ValueError if the source records no trace.
        """
        trace = source.trace
        if trace is None:
            raise ValueError(f"{type(source).__name__} records no trace, so there is nothing to follow")
        table = cls(trace.num_blocks, trace.block_size)
        table._trace = trace
        table.update()
        table.flush()
        return table

    # ------------------------------------------------------------------ moving on

    def watch(self, outputs: Iterable[Output]) -> Generator[Output]:
        """Pass on ``outputs``, such as those of ``llm.stream(...)``, and show what each step did to the pool.

        The last state is always shown, also when the loop is left early, which ends ``outputs`` too.
        """
        try:
            for output in outputs:
                self.update()
                yield output
        finally:
            if isinstance(outputs, Generator):
                outputs.close()  # aborts what still runs, so that its blocks are seen to go
            self.update()
            self.flush()

    def update(self) -> None:
        """Take in the steps that the followed trace has got since, and show them unless a frame was sent just now."""
        if self._trace is None:
            raise ValueError("this table follows no engine: make it with BlockTable.live(llm)")
        new = self._trace.steps[self._num_seen :]
        self._num_seen += len(new)
        for record in new:
            self.apply(record)

    def apply(self, record: StepRecord) -> None:
        """Take in one step, and show it unless a frame was sent just now; :meth:`flush` shows what is left."""
        self._state.apply(record)
        self._last_record = record
        self._num_applied += 1
        frame_bytes = self._state.cells.nbytes + 8 * len(self._state.request_ids)
        interval = max(1 / MAX_FRAMES_PER_SECOND, frame_bytes / MAX_BYTES_PER_SECOND)
        if time.monotonic() - self._last_push >= interval:
            self.flush()

    def flush(self) -> None:
        """Show the state as it is now."""
        record = self._last_record
        if record is None:
            return
        self._last_push = time.monotonic()
        with self.hold_sync():  # one message a frame
            self.cells = self._state.cells.tobytes()
            pairs = [(block, request) for block, requests in self._state.sharers.items() for request in requests]
            self.sharers = b"".join(struct.pack("<II", *pair) for pair in pairs)
            self.status = [self._num_applied, record.num_running, record.num_waiting]
            if len(self.request_ids) != len(self._state.request_ids):
                self.request_ids = list(self._state.request_ids)

    # ------------------------------------------------------------------ without a browser

    def to_svg(self) -> str:
        """A still picture: of a live table now, of a player at the fullest step."""
        return block_svg(self._shown(), self.styles)

    def __repr__(self) -> str:
        pools = "; ".join(
            f"{pool.split.num_blocks} blocks of {pool.split.block_size} tokens; {pool}" for pool in self._shown()
        )
        return f"BlockTable({pools})"

    def _shown(self) -> list[StillPool]:
        caption = f"step {self._num_applied}" if self._num_applied else "before the first step"
        return self._stills or [StillPool(caption, self._state.cells, self._state.split())]

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return data | {"text/plain": repr(self), "image/svg+xml": self.to_svg()}, metadata
