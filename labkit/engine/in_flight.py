"""The requests that are under way: whose they are, what text they have, and who waits for their outputs."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from transformers import PreTrainedTokenizerBase

from labkit.core import Engine
from labkit.scheduling import Request

from .outputs import RequestOutput, RequestTracker
from .prompts import Prompt


class Inbox:
    """Outputs that wait for whoever started the requests: every step's if ``wants_partial``, else the last only."""

    def __init__(self, wants_partial: bool) -> None:
        self.wants_partial = wants_partial
        self._outputs: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)

    def take(self) -> list[RequestOutput]:
        """All that has come, oldest first; they are not given out again."""
        outputs, self._outputs = self._outputs, []
        return outputs


class RequestsInFlight:
    """Drives an engine for several callers at once: each gets the outputs of its own requests."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._trackers: dict[str, RequestTracker] = {}
        self._inboxes: dict[str, Inbox] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._trackers

    def admit(self, request: Request, prompt: Prompt, inbox: Inbox) -> None:
        """Queue a request whose outputs go to ``inbox``."""
        self._engine.add_request(request)
        self._trackers[request.request_id] = RequestTracker(request, prompt.text, self._tokenizer)
        self._inboxes[request.request_id] = inbox

    def run(self, requests: Sequence[tuple[Request, Prompt]]) -> Generator[RequestOutput]:
        """Admit requests and step until all have ended, yielding each when it has."""
        yield from self._run(requests, Inbox(wants_partial=False))

    def stream(self, requests: Sequence[tuple[Request, Prompt]]) -> Generator[RequestOutput]:
        """Admit requests and step until all have ended, yielding what each step changed."""
        yield from self._run(requests, Inbox(wants_partial=True))

    def advance(self) -> None:
        """One engine step: update texts, end what has reached a stop string, hand outputs to those who wait."""
        try:
            changed = self._engine.step()
        except BaseException:  # an interrupt, which has ended the requests of its step
            for request_id in list(self._trackers):
                if not self._engine.scheduler.unfinished(request_id):
                    self.abort(request_id)
            raise
        now = self._engine.executor.now()
        to_deliver: dict[str, RequestTracker] = {}  # what somebody waits for, or may have ended
        for request in changed:
            request_id = request.parent_id or request.request_id
            tracker = self._trackers[request_id]
            stop_string = tracker.update(request, now)
            if stop_string is not None and request.finish_reason is None:
                self._engine.finish(request, "stop", stop_string)
            if request.finish_reason is not None or self._inboxes[request_id].wants_partial:
                to_deliver[request_id] = tracker
        for request_id, tracker in to_deliver.items():
            self._deliver(request_id, finished=tracker.finished)

    def abort(self, request_id: str) -> bool:
        """End a request now; False if it is not under way."""
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return False
        sequences = self._engine.scheduler.unfinished(request_id)
        self._engine.abort(request_id)
        for request in sequences:
            tracker.update(request, self._engine.executor.now())
        self._deliver(request_id, finished=True)
        return True

    def abort_all(self) -> None:
        """End everything."""
        for request_id in list(self._trackers):
            self.abort(request_id)

    def _run(self, requests: Sequence[tuple[Request, Prompt]], inbox: Inbox) -> Generator[RequestOutput]:
        """Whatever cuts this short, an interrupt or a caller that has seen enough, aborts what has not ended."""
        ids = [request.request_id for request, _ in requests]
        try:
            for request, prompt in requests:
                self.admit(request, prompt, inbox)
            while any(request_id in self._trackers for request_id in ids):
                self.advance()
                yield from inbox.take()
            yield from inbox.take()
        finally:
            for request_id in ids:
                self.abort(request_id)

    def _deliver(self, request_id: str, finished: bool) -> None:
        inbox = self._inboxes[request_id]
        if finished or inbox.wants_partial:
            inbox.put(self._trackers[request_id].output(finished))
        if finished:
            del self._trackers[request_id], self._inboxes[request_id]
