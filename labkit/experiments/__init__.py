"""Is it true?

One function for each published experiment, returning a tidy table; :func:`provenance` says where a measured number
comes from. Exports :func:`bench_serve` with the workloads it runs.
"""

from .provenance import provenance
from .serving import SYSTEMS, ServeRow, bench_serve
from .serving_workload import ServeRequest, standard_workload, table_workload

__all__ = [
    "SYSTEMS",
    "ServeRequest",
    "ServeRow",
    "bench_serve",
    "provenance",
    "standard_workload",
    "table_workload",
]
