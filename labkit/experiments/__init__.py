"""Is it true?

One function for each published experiment, returning a tidy table; :func:`provenance` says where a measured number
comes from. Exports :func:`bench_serve` with the workloads it runs. :mod:`labkit.experiments.kv_quality` measures what a
KV format costs in perplexity.
"""

from .provenance import provenance
from .recorded_run import record_run
from .serve_report import save_rows, table
from .serving import SYSTEMS, ServeRow, bench_serve, bench_serve_shape
from .serving_workload import ServeRequest, standard_workload, table_workload

__all__ = [
    "SYSTEMS",
    "ServeRequest",
    "ServeRow",
    "bench_serve",
    "bench_serve_shape",
    "provenance",
    "record_run",
    "save_rows",
    "standard_workload",
    "table",
    "table_workload",
]
