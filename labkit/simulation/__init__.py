"""What if?

Exports :class:`SimulatedExecutor`, which runs the real scheduler and allocator without a model: a cost model (the
:class:`RooflineCost` of the device, and a :class:`HostCost`) moves its clock and a rule supplies the tokens; and
:func:`simulate`, which feeds it requests as they arrive. :func:`calibrate` fits the costs to recorded results.

What arrives is a :class:`Workload`: sampled from a :class:`LengthTable` of a real trace, with
:func:`poisson_arrivals`, :func:`gamma_arrivals` or :func:`all_at_once`, or read from a trace file
(:func:`read_trace`). :func:`make_requests` turns it into requests for :func:`simulate`.
"""

from .calibration import DeviceCalibration, calibrate, recorded_rows, served_at_once
from .cost_model import HostCost, RooflineCost, StepWork
from .executor import SimulatedExecutor, filler_token, free_of_charge
from .length_tables import LengthTable
from .simulate import simulate
from .traces import read_azure_csv, read_burstgpt_csv, read_mooncake_jsonl, read_trace, read_vidur_csv
from .workloads import (
    TimedLengths,
    Workload,
    all_at_once,
    gamma_arrivals,
    hashed_prompts,
    make_requests,
    poisson_arrivals,
    random_prompts,
    sample_workload,
)

__all__ = [
    "DeviceCalibration",
    "HostCost",
    "LengthTable",
    "RooflineCost",
    "SimulatedExecutor",
    "StepWork",
    "TimedLengths",
    "Workload",
    "all_at_once",
    "calibrate",
    "filler_token",
    "free_of_charge",
    "gamma_arrivals",
    "hashed_prompts",
    "make_requests",
    "poisson_arrivals",
    "random_prompts",
    "read_azure_csv",
    "read_burstgpt_csv",
    "read_mooncake_jsonl",
    "read_trace",
    "read_vidur_csv",
    "recorded_rows",
    "sample_workload",
    "served_at_once",
    "simulate",
]
