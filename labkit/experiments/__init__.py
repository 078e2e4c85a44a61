"""Is it true?

One function for each published experiment, returning a tidy table; :func:`provenance` says where a measured number
comes from. Exports :func:`bench_serve` with the workloads it runs. :mod:`labkit.experiments.kv_quality` measures what
a KV format costs in perplexity, :mod:`~labkit.experiments.heads` what fewer KV heads cost and
:mod:`~labkit.experiments.uptrain` gives back. Without a model, on the simulator:
:mod:`~labkit.experiments.fragmentation`, :mod:`~labkit.experiments.prefix_hits`, :mod:`~labkit.experiments.sweep`,
and :mod:`~labkit.experiments.simulator_validation`. What needs torch is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .provenance import provenance

if TYPE_CHECKING:
    from .combined_ladder import combined, predict_combined
    from .recorded_run import record_run
    from .serve_report import save_rows, table
    from .serving import SYSTEMS, ServeRow, bench_serve, bench_serve_shape
    from .serving_workload import ServeRequest, standard_workload, table_workload

_HOME_OF = {
    "combined": "combined_ladder",
    "predict_combined": "combined_ladder",
    "record_run": "recorded_run",
    "save_rows": "serve_report",
    "table": "serve_report",
    "SYSTEMS": "serving",
    "ServeRow": "serving",
    "bench_serve": "serving",
    "bench_serve_shape": "serving",
    "ServeRequest": "serving_workload",
    "standard_workload": "serving_workload",
    "table_workload": "serving_workload",
}

__all__ = [
    "SYSTEMS",
    "ServeRequest",
    "ServeRow",
    "bench_serve",
    "bench_serve_shape",
    "combined",
    "predict_combined",
    "provenance",
    "record_run",
    "save_rows",
    "standard_workload",
    "table",
    "table_workload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'labkit.experiments' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
