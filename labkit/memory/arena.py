"""A first-fit arena: contiguous runs of blocks, and the holes between them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort


class FirstFitArena:
    """Hands out contiguous runs, always from the first hole that is long enough (Knuth, TAOCP 1, section 2.5).

    Runs come and go in different sizes, so holes appear that nobody fits into, although together they would do:
    external fragmentation::

        ████████░░████░░░████████░░████████     9 free in all, no run of 4
    """

    def __init__(self, size: int) -> None:
        """Make an arena of ``size`` free blocks."""
        self.size = size
        self.num_free = size
        self._holes: list[tuple[int, int]] = [(0, size)]  # (start, length), by start, never adjacent

    def allocate(self, length: int) -> int | None:
        """Start of a run of ``length`` blocks, or None if no hole is that long."""
        for index, (start, hole) in enumerate(self._holes):
            if hole >= length:
                if hole == length:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + length, hole - length)
                self.num_free -= length
                return start
        return None

    def allocate_at(self, start: int, length: int) -> int | None:
        """``start`` if the ``length`` blocks from there are free and now taken, else None."""
        index = bisect_right(self._holes, (start, self.size)) - 1
        if index < 0:
            return None
        hole_start, hole = self._holes[index]
        if hole_start + hole < start + length:
            return None
        after = (start + length, hole_start + hole - start - length)
        self._holes[index : index + 1] = [h for h in ((hole_start, start - hole_start), after) if h[1] > 0]
        self.num_free -= length
        return start

    def free(self, start: int, length: int) -> None:
        """Give a run back; it grows together with the holes beside it."""
        self.num_free += length
        index = bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and self._holes[index][0] == start + length:
            length += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == start:
            before = self._holes.pop(index - 1)
            start, length = before[0], before[1] + length
        insort(self._holes, (start, length))

    @property
    def largest_hole(self) -> int:
        """Length of the longest run that could be had now."""
        return max((length for _, length in self._holes), default=0)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """All holes as (start, length), by start."""
        return list(self._holes)
