"""What happened?

Exports the event types and :class:`StepRecord`, the :class:`Trace` that keeps, saves and loads them,
:class:`BlockTableState` that plays them back block by block, and :class:`EngineStats`. Everything that a figure or a
widget shows of a run comes from here.
"""

from .events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksLanded,
    BlocksShared,
    BlocksSwappedIn,
    BlocksSwappedOut,
    Event,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepRecord,
)
from .replay import BlockTableState, BlockView
from .stats import EngineStats
from .trace import Trace

__all__ = [
    "BlockCopied",
    "BlockTableState",
    "BlockView",
    "BlocksAllocated",
    "BlocksCached",
    "BlocksEvicted",
    "BlocksFreed",
    "BlocksLanded",
    "BlocksShared",
    "BlocksSwappedIn",
    "BlocksSwappedOut",
    "EngineStats",
    "Event",
    "RequestArrived",
    "RequestFinished",
    "RequestPreempted",
    "StepRecord",
    "Trace",
]
