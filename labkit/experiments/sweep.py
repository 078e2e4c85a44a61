"""The same function for many configurations, in parallel, resumable, as one tidy table."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from labkit.ray_cluster import ray_cluster

Configuration = Mapping[str, Any]
"""Keyword arguments, JSON values."""

Result = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A row, or several; JSON values."""

Outcome = tuple[int, Result | None, Exception | None]

_FAILURES_SHOWN = 3  # what fails for one configuration often fails for all


def grid(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Every combination: ``grid(block_size=(16, 32), rate=(1, 2, 4))`` has six configurations."""
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def sweep(
    run: Callable[..., Result],
    configurations: Iterable[Configuration],
    *,
    folder: str | Path | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """``run(**configuration)`` for each configuration; a table with their columns and those of the rows returned.

    Args:
        run: a function of a module, so that other processes find it.
        folder: keeps one JSON file a configuration; those that are there already are not run again.
        workers: local processes, as many as there are cores if None; with 1 all runs in this one.
        ray_address: of a Ray cluster ("auto", "local", "ray://host:port"), which then runs them in place of local
            processes. It must have labkit installed.

    Rows stand in the order of ``configurations``. If some fail, the others are finished and kept, then RuntimeError
    names those. Raises ValueError if ``workers`` < 1 or a configuration is no JSON, ImportError if Ray is not there.
    """
    configurations = [dict(configuration) for configuration in configurations]
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    files = [_result_file(folder, run, configuration) for configuration in configurations]
    results = [_read(file) for file in files]
    missing = {i: c for i, (c, result) in enumerate(zip(configurations, results, strict=True)) if result is None}

    num_workers = min(workers or os.cpu_count() or 1, len(missing))
    if ray_address is not None:
        outcomes = _on_ray(run, missing, ray_address)
    elif num_workers > 1:
        outcomes = _in_processes(run, missing, num_workers)
    else:
        outcomes = _here(run, missing)
    failed: dict[int, Exception] = {}
    with tqdm(outcomes, total=len(missing), desc="Sweep", unit="run", disable=not progress or not missing) as bar:
        for index, result, error in bar:
            if error is not None or result is None:
                failed[index] = error or TypeError("run must return a row or rows, got None")
                continue
            results[index] = result
            _write(files[index], configurations[index], result)
    if failed:
        named = "; ".join(f"{configurations[i]}: {error}" for i, error in sorted(failed.items())[:_FAILURES_SHOWN])
        if len(failed) > _FAILURES_SHOWN:
            named += "; ..."
        raise RuntimeError(f"{len(failed)} of {len(configurations)} runs failed, the others are done: {named}")
    return pd.DataFrame(
        [
            configuration | dict(row)
            for configuration, result in zip(configurations, results, strict=True)
            for row in _rows(result)
        ]
    )


def _here(run: Callable[..., Result], missing: Mapping[int, Configuration]) -> Iterator[Outcome]:
    for index, configuration in missing.items():
        try:
            yield index, run(**configuration), None
        except Exception as error:
            yield index, None, error


def _in_processes(run: Callable[..., Result], missing: Mapping[int, Configuration], workers: int) -> Iterator[Outcome]:
    # Spawned, not forked: a fork copies the locks of threads that it does not copy.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(run, **configuration): index for index, configuration in missing.items()}
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                yield futures[future], future.result(), None
            elif isinstance(error, Exception):
                yield futures[future], None, error
            else:
                raise error


def _on_ray(run: Callable[..., Result], missing: Mapping[int, Configuration], address: str) -> Iterator[Outcome]:
    with ray_cluster(address) as ray:
        remote = ray.remote(run)
        references = {remote.remote(**configuration): index for index, configuration in missing.items()}
        waiting = list(references)
        while waiting:
            (ready,), waiting = ray.wait(waiting, num_returns=1)
            try:
                yield references[ready], ray.get(ready), None
            except Exception as error:
                yield references[ready], None, getattr(error, "cause", error)  # without the worker's traceback


def _result_file(folder: str | Path | None, run: Callable[..., Result], configuration: Configuration) -> Path | None:
    """Where the result of a configuration is kept: the name is a hash of the function's name and the arguments."""
    try:
        text = json.dumps([f"{run.__module__}.{run.__qualname__}", configuration], sort_keys=True)
    except TypeError as error:
        raise ValueError(f"configurations must hold JSON values, got {configuration!r}") from error
    return None if folder is None else Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(file: Path | None) -> Result | None:
    """The kept result; None if there is none, or if the file is damaged."""
    try:
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))["result"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path | None, configuration: Configuration, result: Result) -> None:
    """Keep a result. The file appears whole or not at all, however the process ends."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps({"configuration": configuration, "result": result}, indent=1), encoding="utf-8")
    unfinished.replace(file)


def _rows(result: Result | None) -> Sequence[Mapping[str, Any]]:
    if result is None:
        return []
    return [result] if isinstance(result, Mapping) else result
