"""What if?

Exports :class:`SimulatedExecutor`, which runs the real scheduler and allocator without a model: a cost model (the
:class:`RooflineCost`) moves its clock and a rule supplies the tokens; and :func:`simulate`, which feeds it requests
as they arrive.
"""

from .cost_model import RooflineCost
from .executor import SimulatedExecutor, filler_token, free_of_charge
from .simulate import simulate

__all__ = ["RooflineCost", "SimulatedExecutor", "filler_token", "free_of_charge", "simulate"]
