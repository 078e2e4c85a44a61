"""What if?

Exports :class:`SimulatedExecutor`, which runs the real scheduler and allocator without a model: a cost model moves
its clock and a rule supplies the tokens.
"""

from .executor import SimulatedExecutor, filler_token, free_of_charge

__all__ = ["SimulatedExecutor", "filler_token", "free_of_charge"]
