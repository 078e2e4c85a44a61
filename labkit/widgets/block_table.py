"""The block pool as a picture: a player for traces, and a live view of an engine."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anywidget
import traitlets

from labkit.observe import StepRecord, Trace

from .block_cells import Cells, CellState, PoolSplit, encode_trace
from .block_svg import block_svg
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

    Point at a block, or focus the picture and use the arrow keys, for its request, logical block, tokens and ref_cnt.
    """

    _esm = Path(__file__).with_name("block_table.js")
    _css = Path(__file__).with_name("block_table.css")

    num_blocks = traitlets.Int().tag(sync=True)
    block_size = traitlets.Int().tag(sync=True)
    styles = traitlets.List().tag(sync=True)
    request_ids = traitlets.List(traitlets.Unicode()).tag(sync=True)
    # A live table: the cells now, and [number of the step, running, waiting].
    cells = traitlets.Bytes(b"").tag(sync=True)
    status = traitlets.List(traitlets.Int()).tag(sync=True)
    # A player: see EncodedTrace.
    changes = traitlets.Bytes(b"").tag(sync=True)
    steps = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, num_blocks: int, block_size: int, **traits: Any) -> None:
        """An empty pool, to be fed with :meth:`apply`. Raises ValueError unless both numbers are >= 1."""
        self._state = CellState(num_blocks, block_size)
        self._trace: Trace | None = None
        self._num_seen = 0
        self._num_applied = 0
        self._last_record: StepRecord | None = None
        self._last_push = float("-inf")
        self._fullest: tuple[str, Cells, PoolSplit] | None = None  # of a player: its still picture
        traits.setdefault("cells", self._state.cells.tobytes())
        traits.setdefault("status", [0, 0, 0])
        super().__init__(num_blocks=num_blocks, block_size=block_size, styles=request_styles(), **traits)

    @classmethod
    def from_trace(cls, trace: Trace, every: int = 1) -> BlockTable:
        """A player for every ``every``-th step of a trace. All of it goes to the browser, once.

        Raises ValueError if the trace is empty, ``every`` < 1, or too much would have to be sent.
        """
        encoded = encode_trace(trace, every)
        table = cls(
            trace.num_blocks,
            trace.block_size,
            request_ids=encoded.request_ids,
            cells=b"",
            changes=encoded.changes,
            steps=encoded.steps,
        )
        caption = f"step {encoded.fullest_step} of {len(trace)}, the fullest"
        table._fullest = caption, encoded.fullest_cells, encoded.fullest_split
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
            self.status = [self._num_applied, record.num_running, record.num_waiting]
            if len(self.request_ids) != len(self._state.request_ids):
                self.request_ids = list(self._state.request_ids)

    # ------------------------------------------------------------------ without a browser

    def to_svg(self) -> str:
        """A still picture: of a live table now, of a player at the fullest step."""
        caption, cells, split = self._still()
        return block_svg(cells, split, self.styles, caption)

    def __repr__(self) -> str:
        caption, _, split = self._still()
        return f"BlockTable({self.num_blocks} blocks of {self.block_size} tokens; {caption}: {split})"

    def _still(self) -> tuple[str, Cells, PoolSplit]:
        caption = f"step {self._num_applied}" if self._num_applied else "before the first step"
        return self._fullest or (caption, self._state.cells, self._state.split())

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        return data | {"text/plain": repr(self), "image/svg+xml": self.to_svg()}, metadata
