"""How does a step go?

Exports the :class:`Engine` (the only loop) and the :class:`Executor` protocol. The step's own words,
:class:`StepPlan` and :class:`StepResult`, live in ``scheduling`` because the scheduler makes and reads them.
"""

from labkit.scheduling import StepPlan, StepResult

from .engine import Engine
from .executor import Executor, ExecutorLost

__all__ = ["Engine", "Executor", "ExecutorLost", "StepPlan", "StepResult"]
