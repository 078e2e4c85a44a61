"""Sequences on their way to host memory and back: which copies a plan carries, and who waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.memory import CachedBlock, KVAllocator

from .request import Request
from .step import StepPlan


class SwapTraffic:
    """Swaps that were begun and have not landed.

    They gather until the plan that is being made takes them along, and are under way until that step has ended::

        send_out(a), bring_back(b)  ─►  load(step 7)  ─►  plan 7 runs  ─►  land(plan 7)
        b.is_arriving                                                      b may run
    """

    def __init__(self, kv: KVAllocator) -> None:
        self._kv = kv
        self._outs: list[tuple[int, int]] = []
        self._ins: list[tuple[int, int]] = []
        self._movers: list[Request] = []  # whose blocks these are
        self._under_way: dict[int, list[Request]] = {}  # by the step that moves their blocks

    def __bool__(self) -> bool:
        """Whether any blocks wait for a plan or are under way."""
        return bool(self._movers or self._under_way)

    def send_out(self, request: Request) -> bool:
        """Free a sequence's blocks and keep what can be kept of its computed tokens; False if there is no room."""
        copies = self._kv.swap_out(request.request_id)
        if copies is None:
            return False
        self._outs += copies
        self._movers.append(request)
        request.num_computed_tokens = self._kv.num_computed_tokens(request.request_id)
        return True

    def bring_back(self, request: Request, prefix: Sequence[CachedBlock], keep_free: int) -> bool:
        """Give a swapped-out sequence blocks, those of ``prefix`` first; False if it has to stay where it is."""
        salt = request.cache_salt
        copies = self._kv.swap_in(request.request_id, request.num_tokens, prefix=prefix, salt=salt, keep_free=keep_free)
        if copies:
            self._ins += copies
            self._movers.append(request)
            request.is_arriving = True
        return copies is not None

    def load(self, step: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The copies out and in for the plan of ``step``."""
        swap_outs, swap_ins = tuple(self._outs), tuple(self._ins)
        if self._movers:
            self._under_way.setdefault(step, []).extend(self._movers)  # an empty plan leaves its step to the next
            self._outs, self._ins, self._movers = [], [], []
        return swap_outs, swap_ins

    def land(self, plan: StepPlan) -> list[Request]:
        """Count the copies of ``plan`` as landed; the sequences that they were for."""
        self._kv.land(plan.swap_outs, plan.swap_ins)
        landed = self._under_way.pop(plan.step, [])
        for request in landed:
            request.is_arriving = False
        return landed
