"""Who runs next?

Exports :class:`Request` and :class:`SamplingParams`, the :class:`Scheduler` that fills each step's token budget
(continuous batching), and what it hands to an executor: :class:`StepPlan` out, :class:`StepResult` back.
"""

from .request import Request, RequestStatus
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerConfig
from .step import ScheduledRequest, StepPlan, StepResult

__all__ = [
    "Request",
    "RequestStatus",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
    "StepResult",
]
