"""Who runs next?

Exports :class:`Request` and :class:`SamplingParams`; the :class:`Scheduler` that fills each step's token budget
(continuous batching) and the :class:`StaticScheduler` to compare it with; and what they hand to an executor,
:class:`StepPlan`, and take back, :class:`StepResult`. :class:`PreemptionCost` decides between swapping and recomputing.
"""

from .config import PreemptionCost, SchedulerConfig
from .request import Request, RequestStatus
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .static_scheduler import StaticScheduler
from .step import ScheduledRequest, StepPlan, StepResult

__all__ = [
    "PreemptionCost",
    "Request",
    "RequestStatus",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "StaticScheduler",
    "StepPlan",
    "StepResult",
]
