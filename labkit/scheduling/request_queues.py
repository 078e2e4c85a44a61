"""Who waits, who runs, and which sequences belong to one request."""

from __future__ import annotations

from bisect import insort

from .request import Request, RequestStatus, forked_id


class RequestQueues:
    """All unfinished sequences.

    Attributes:
        waiting, running: in the order in which they are served, by priority, then arrival, then sample.
    """

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._families: dict[str, list[Request]] = {}  # a request and what was forked from it, by its id
        self._num_added = 0

    def __bool__(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._families)

    def family(self, request_id: str) -> list[Request]:
        """The unfinished sequences of a request: itself, and what was forked from it."""
        return list(self._families.get(request_id, ()))

    def has_id_of(self, request: Request) -> bool:
        """Whether an unfinished request has the id of ``request``, or one that its forks will have."""
        own_ids = {forked_id(request.request_id, i) for i in range(request.sampling_params.n)}
        return bool(self._families.keys() & {*own_ids, request.request_id.rpartition("#")[0]})

    def add(self, request: Request) -> None:
        """Have a new request wait."""
        self._num_added += 1
        request.queue_key = (request.priority, self._num_added, 0)
        self._families[request.request_id] = [request]
        insort(self.waiting, request, key=_queue_key)

    def add_fork(self, child: Request, parent: Request) -> None:
        """Let a sequence run that was just forked from ``parent``."""
        self._families[parent.request_id].append(child)
        insort(self.running, child, key=_queue_key)

    def start_first(self) -> None:
        """Let the first of those who wait run."""
        request = self.waiting.pop(0)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_queue_key)

    def stop(self, request: Request) -> None:
        """Have one who runs wait again, before those who came later."""
        self.running.remove(request)
        request.status = RequestStatus.WAITING
        insort(self.waiting, request, key=_queue_key)

    def finish(self, request: Request) -> None:
        """Take a sequence out for good."""
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        request.status = RequestStatus.FINISHED
        family_id = request.parent_id or request.request_id
        self._families[family_id].remove(request)
        if not self._families[family_id]:
            del self._families[family_id]


def _queue_key(request: Request) -> tuple[int, int, int]:
    return request.queue_key
