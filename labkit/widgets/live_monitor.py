"""The live monitor: where an engine's memory is and how fast it goes, while it runs."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from labkit.kv_math import format_bytes

from .live_monitor_svg import BARS, live_monitor_svg

if TYPE_CHECKING:
    from labkit.engine import LLM, RequestOutput

MIN_INTERVAL = 0.1
"""Seconds: ten pictures a second are enough for the eye, and cost the engine nothing."""
RATE_WINDOW = 2.0
"""Seconds over which tokens/s is taken."""
MAX_HISTORY = 600


class LiveMonitor(anywidget.AnyWidget):
    """Two bars, the device's memory and the KV pool, with requests and tokens/s; a thread follows the engine.

    ::

        monitor = LiveMonitor(llm)
        display(monitor)
        llm.generate(prompts, params)                # it follows whatever the engine does ...

        monitor.run(llm.stream(prompts, params))     # ... or runs it in the background: this cell returns at once,
        outputs = monitor.wait()                     # the button Stop works, and this waits for the end

    It ends when the LLM is closed or :meth:`close` is called; an idle engine costs nothing.
    """

    _esm = Path(__file__).with_name("live_monitor.js")
    _css = Path(__file__).with_name("live_monitor.css")

    device = traitlets.Unicode().tag(sync=True)
    bars = traitlets.List().tag(sync=True)
    parts = traitlets.Dict().tag(sync=True)  # bytes by the names in `bars`
    status = traitlets.Dict().tag(sync=True)
    history = traitlets.Bytes(b"").tag(sync=True)  # uint16 [num_samples, 2]: live and held share of the pool, x 10,000

    def __init__(self, llm: LLM, interval: float = MIN_INTERVAL) -> None:
        """``interval`` is seconds between pictures.

        Raises ValueError if it is < 0.1, TypeError unless ``llm`` is an LLM, RuntimeError if that is closed.
        """
        self._closing, self._stopping = threading.Event(), threading.Event()  # first: close() is called in any case
        if not interval >= MIN_INTERVAL:
            raise ValueError(f"interval must be >= {MIN_INTERVAL} seconds, got {interval}")
        if not hasattr(llm, "memory_monitor"):
            raise TypeError(f"llm must be a labkit LLM, got {type(llm).__name__}")
        self._memory = llm.memory_monitor()
        self._llm = weakref.ref(llm)  # a picture must not keep a model alive
        self._rates: deque[tuple[float, int]] = deque()
        self._shares: deque[tuple[int, int]] = deque(maxlen=MAX_HISTORY)
        self._seen: object = None
        self._lock = threading.Lock()
        self._run: threading.Thread | None = None
        self._outputs: dict[str, RequestOutput] = {}
        self._error: BaseException | None = None
        super().__init__(device=str(llm.memory.device), bars=[list(bar) for bar in BARS])
        self._sample()
        self.on_msg(lambda _widget, content, _buffers: content == "stop" and self.stop())
        threading.Thread(target=self._follow, args=(interval,), name="labkit-live-monitor", daemon=True).start()

    # ------------------------------------------------------------------ running in the background

    def run(self, outputs: Iterable[RequestOutput]) -> None:
        """Consume ``outputs``, such as ``llm.stream(...)``, in a thread. Leave the LLM alone until :meth:`wait`.

        Raises RuntimeError while the run before has not ended.
        """
        if self._run is not None and self._run.is_alive():
            raise RuntimeError("the run before has not ended: call wait(), or stop() and wait(), first")
        self._stopping.clear()
        self._outputs, self._error = {}, None
        self._run = threading.Thread(target=self._consume, args=(outputs,), name="labkit-live-run", daemon=True)
        self._run.start()

    def stop(self) -> None:
        """Ask the run to end after its step; what has not finished is aborted. The button Stop does this."""
        self._stopping.set()

    def wait(self) -> list[RequestOutput]:
        """Wait for the end of the run; the last output of each request. Raises what the run raised.

        An interrupt of the waiting cell ends the run too.
        """
        if self._run is not None:
            try:
                self._run.join()
            except BaseException:
                self.stop()
                self._run.join()
                raise
        self._sample()
        if self._error is not None:
            raise self._error
        return list(self._outputs.values())

    def close(self) -> None:
        """End the run and the following, and remove the widget."""
        self.stop()
        self._closing.set()
        super().close()

    def _consume(self, outputs: Iterable[RequestOutput]) -> None:
        try:
            for output in outputs:
                self._outputs[output.request_id] = output
                if self._stopping.is_set():
                    break
        except BaseException as error:
            self._error = error
        finally:
            if isinstance(outputs, Generator):
                outputs.close()  # aborts what still runs

    # ------------------------------------------------------------------ following

    def _follow(self, interval: float) -> None:
        while not self._closing.wait(interval):
            if not self._sample():
                return

    def _sample(self) -> bool:
        """Show the engine as it is now, unless nothing has changed; False once there is nothing to follow any more."""
        with self._lock:
            llm = self._llm()
            if llm is None or llm.is_closed:
                if self.status["state"] != "closed":
                    self.status = {**self.status, "state": "closed", "running": 0, "waiting": 0, "stoppable": False}
                return False
            stats, busy = llm.stats, llm.engine.has_unfinished
            stoppable = self._run is not None and self._run.is_alive()
            now = id(stats), stats.num_steps, busy, stoppable
            if now != self._seen:
                self._seen = now
                self._show(stats, busy, stoppable)
            return True

    def _show(self, stats: Any, busy: bool, stoppable: bool) -> None:
        snapshot = self._memory.snapshot()
        parts = snapshot.parts()
        parts["kv_pool"] = sum(size for name, size in parts.items() if name.startswith("kv_"))
        pool = parts["kv_pool"] - parts["kv_tails"]
        if busy:
            held = parts["kv_live"] + parts["kv_fragmentation"]
            self._shares.append((round(10_000 * parts["kv_live"] / pool), round(10_000 * held / pool)))
        with self.hold_sync():  # one message a picture
            self.parts = parts
            self.history = np.array(self._shares, np.uint16).tobytes()
            self.status = {
                "state": "running" if busy else "idle",
                "stoppable": stoppable,
                "running": stats.num_running if busy else 0,
                "waiting": stats.num_waiting if busy else 0,
                "generated": stats.num_generated_tokens,
                "tokens_per_second": self._rate(stats.num_generated_tokens) if busy else stats.tokens_per_second,
            }

    def _rate(self, num_generated: int) -> float:
        """Generated tokens a second over the last two seconds."""
        now = time.monotonic()
        if self._rates and num_generated < self._rates[-1][1]:
            self._rates.clear()  # the statistics began anew
        self._rates.append((now, num_generated))
        while now - self._rates[0][0] > RATE_WINDOW and len(self._rates) > 2:
            self._rates.popleft()
        then, before = self._rates[0]
        return (num_generated - before) / (now - then) if now > then else 0.0

    # ------------------------------------------------------------------ without a browser

    def __repr__(self) -> str:
        status, parts = self.status, self.parts
        return (
            f"LiveMonitor({self.device}; {status['state']}: {status['running']} running, {status['waiting']} waiting, "
            f"{status['generated']} tokens generated; weights {format_bytes(parts['weights'])}, "
            f"KV pool {format_bytes(parts['kv_pool'])} of which live {format_bytes(parts['kv_live'])})"
        )

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:
            return None
        data, metadata = bundle
        picture = live_monitor_svg(self.parts, f"{self.device}, {self.status['state']}")
        return data | {"text/plain": repr(self), "image/svg+xml": picture}, metadata
