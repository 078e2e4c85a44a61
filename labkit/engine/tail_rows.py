"""Which row of the tails belongs to which running request."""

from __future__ import annotations

from collections.abc import Iterable


class TailRows:
    """Gives each request a row when it first runs and takes it back when it has ended or lost its blocks.

    An unfinished block belongs to its sequence and not to the pool, so it needs no allocator: a row each is enough.
    """

    def __init__(self, num_rows: int) -> None:
        """``num_rows``: requests that run at once."""
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        """Rows that are taken."""
        return len(self._rows)

    def of(self, request_id: str) -> int:
        """The row of a request, the same until :meth:`release`."""
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = self._free.pop()
        return row

    def release(self, request_ids: Iterable[str]) -> None:
        """Take back the rows of those that have one."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free.append(row)
