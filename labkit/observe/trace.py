"""A trace: everything an engine did, step by step, in memory and in a file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from . import events as event_types
from .events import Event, StepRecord

FORMAT = "labkit-trace"
VERSION = 1
STEPS_PER_FLUSH = 256
"""A file that is written while the engine runs lacks at most this many steps after a crash."""

# Event classes by the name that stands for them in a file.
_EVENTS = {
    "alloc": event_types.BlocksAllocated,
    "share": event_types.BlocksShared,
    "copy": event_types.BlockCopied,
    "free": event_types.BlocksFreed,
    "cache": event_types.BlocksCached,
    "evict": event_types.BlocksEvicted,
    "swap_out": event_types.BlocksSwappedOut,
    "swap_in": event_types.BlocksSwappedIn,
    "land": event_types.BlocksLanded,
    "arrive": event_types.RequestArrived,
    "preempt": event_types.RequestPreempted,
    "finish": event_types.RequestFinished,
}
_NAMES = {cls: name for name, cls in _EVENTS.items()}
_BROKEN = (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, AttributeError)
"""What reading a file that is damaged, breaks off, or is something else can raise."""


class Trace:
    """The steps of an engine, in order, with what a reader needs to know about the pool.

    The file is gzipped JSON lines: a header, then one line a step. It is written while the engine runs if ``path``
    is given, and what was written before a crash can be loaded. No pickle.
    """

    def __init__(self, num_blocks: int, block_size: int, *, path: str | Path | None = None, **meta: Any) -> None:
        """Start a trace of a pool of ``num_blocks`` blocks; ``meta`` (JSON values) says where it comes from."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.meta = meta
        self.steps: list[StepRecord] = []
        self.is_truncated = False
        self._file: TextIO | None = None
        if path is not None:
            self._file = cast(TextIO, gzip.open(path, "wt", encoding="utf-8"))  # noqa: SIM115 (closed by close)
            self._file.write(self._header())
            self._file.flush()

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def record(self, step: StepRecord) -> None:
        """Append a step. Tuples that did not change since the last step are kept once."""
        if self.steps:
            last = self.steps[-1]
            same = {
                name: getattr(last, name)
                for name in ("scheduled_ids", "num_scheduled_tokens", "sampled_ids")
                if getattr(last, name) == getattr(step, name)
            }
            if same:
                step = step._replace(**same)
        if self._file is not None:
            self._file.write(_encode(step, self.steps[-1] if self.steps else None))
            if len(self.steps) % STEPS_PER_FLUSH == STEPS_PER_FLUSH - 1:
                self._file.flush()
        self.steps.append(step)

    def close(self) -> None:
        """Finish the file that is written while running, if there is one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def save(self, path: str | Path) -> None:
        """Write the whole trace to ``path``."""
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(self._header())
            last = None
            for step in self.steps:
                file.write(_encode(step, last))
                last = step

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace. A file that breaks off gives the steps that are whole, and ``is_truncated`` is set.

        Raises ValueError if the file is no trace or of a newer version.
        """
        lines = _lines(path)
        try:
            header = json.loads(next(lines))
            if header["format"] != FORMAT:
                raise ValueError(header["format"])
            version, num_blocks, block_size = header["version"], header["num_blocks"], header["block_size"]
            meta = dict(header["meta"])
        except FileNotFoundError:
            raise
        except (*_BROKEN, StopIteration) as error:
            raise ValueError(f"{path} is not a labkit trace") from error
        if version > VERSION:
            raise ValueError(f"{path} is a trace of version {version}; this labkit reads up to {VERSION}")
        trace = cls(num_blocks, block_size, **meta)
        try:
            for line in lines:
                trace.steps.append(_decode(line, trace.steps[-1] if trace.steps else None))
        except _BROKEN:
            trace.is_truncated = True
        return trace

    def _header(self) -> str:
        header = {"format": FORMAT, "version": VERSION, "num_blocks": self.num_blocks, "block_size": self.block_size}
        return json.dumps(header | {"meta": self.meta}) + "\n"

    def __repr__(self) -> str:
        return f"Trace({len(self)} steps, {self.num_blocks} blocks of {self.block_size} tokens)"


def _lines(path: str | Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from file


def _encode(step: StepRecord, last: StepRecord | None) -> str:
    """One line; a column that equals the last step's is left out."""
    line = step._asdict()
    line["events"] = [[_NAMES[type(event)], *event] for event in step.events]
    if last is not None:
        for name in ("scheduled_ids", "num_scheduled_tokens", "sampled_ids"):
            if getattr(last, name) == line[name]:
                del line[name]
    return json.dumps(line, separators=(",", ":")) + "\n"


def _decode(text: str, last: StepRecord | None) -> StepRecord:
    line = json.loads(text)
    for name in ("scheduled_ids", "num_scheduled_tokens", "sampled_ids"):
        line[name] = tuple(line[name]) if name in line else getattr(last, name)
    line["events"] = tuple(_decode_event(*event) for event in line["events"])
    return StepRecord(**line)


def _decode_event(name: str, *values: Any) -> Event:
    return _EVENTS[name](*(tuple(v) if isinstance(v, list) else v for v in values))
