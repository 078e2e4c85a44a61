"""Every lesson from its first cell to its last, with its seconds: what a reader of this machine will wait for.

python -m labkit.experiments.notebooks --out notebooks.json                  all lessons, one after the other
python -m labkit.experiments.notebooks --out notebooks.json --only 03 07     some; those of others in the file stay
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

from .provenance import provenance
from .result_file import Row, read_results, write_results

LESSONS = Path(__file__).parents[2] / "notebooks"
_LONGEST = 4000  # characters of what a cell shows that are kept


def lessons(only: Sequence[str] = (), folder: Path = LESSONS) -> list[Path]:
    """The notebooks of ``folder`` in order, or those whose names begin with one of ``only``: "03", "07_live".

    Raises ValueError for a folder without notebooks, and for one of ``only`` that none begins with.
    """
    paths = sorted(folder.glob("*.ipynb"))
    if not paths:
        raise ValueError(
            f"folder must hold notebooks, and {folder} holds none: they are in a checkout of the repository"
        )
    if unknown := [start for start in only if not any(path.name.startswith(start) for path in paths)]:
        known = ", ".join(path.stem for path in paths)
        raise ValueError(f"only must be how lessons begin, of {known}; got {', '.join(unknown)}")
    return [path for path in paths if not only or path.name.startswith(tuple(only))]


async def run_lesson(path: Path, time_limit: float, executed: Path | None = None) -> Row:
    """Run one notebook in a kernel of its own; what goes wrong is in the row: the cell's number and the error.

    What its cells show as text is in the row, too.

    Args:
        path: the notebook; its cells run in its folder.
        time_limit: seconds for all cells and the kernel's start.
        executed: folder for a copy with outputs, as far as it came; without widgets, whose state is many MB.
    """
    notebook = nbformat.read(path, as_version=4)
    row: Row = {"lesson": path.stem, "seconds": None, "slowest_cell": None, "error": None}
    seconds: dict[int, float] = {}  # of each cell; the last one is where it stopped

    def cell_starts(cell_index: int, **_: object) -> None:
        seconds[cell_index] = -time.perf_counter()

    def cell_ends(cell_index: int, **_: object) -> None:
        seconds[cell_index] += time.perf_counter()

    started = time.perf_counter()
    client = NotebookClient(
        notebook,
        timeout_func=lambda cell: max(started + time_limit - time.perf_counter(), 0.1),
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        record_timing=False,
        on_notebook_start=_interruptible,
        on_cell_execute=cell_starts,
        on_cell_executed=cell_ends,
    )
    try:
        await client.async_execute()
    except TimeoutError:
        row["error"] = f"longer than {time_limit:g} s"
    except CellExecutionError as failure:
        row["error"] = f"{failure.ename}: {failure.evalue}"
        tqdm.write(f"{path.name}:\n{_plain(failure.traceback)}")
    except Exception as failure:  # a kernel that dies or does not start; the other lessons are still to come
        row["error"] = f"{type(failure).__name__}: {failure}"
    row["seconds"] = round(time.perf_counter() - started, 2)
    if row["error"]:
        row["cell"] = max(seconds, default=None)
    elif seconds:
        slowest = max(seconds, key=lambda index: seconds[index])
        row["slowest_cell"] = {"cell": slowest, "seconds": round(seconds[slowest], 2)}
    row["shown"] = shown(notebook)
    if executed is not None:
        executed.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, executed / path.name)
    return row


def shown(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """What cells print and the values they show, as text, by number of the cell: no figures, no widgets, no home."""
    texts: dict[str, str] = {}
    for number, cell in enumerate(notebook.cells):
        parts = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if output.output_type == "stream" and output.name == "stdout":
                parts.append(output.text.strip())
            elif set(data) <= {"text/plain", "text/html", "text/markdown"}:
                plain = data.get("text/plain", "")
                parts.append("" if plain.startswith("<") else plain)  # no object's name
        if text := "\n".join(filter(None, parts)).replace(str(Path.home()), "~"):
            texts[str(number)] = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    return texts


async def run_lessons(
    paths: Sequence[Path], *, jobs: int = 1, time_limit: float = 300.0, executed: Path | None = None
) -> AsyncIterator[Row]:
    """Rows of :func:`run_lesson` as they come. ``jobs`` lessons run at a time; several share what they are timed on."""
    free = asyncio.Semaphore(jobs)

    async def one(path: Path) -> Row:
        async with free:
            return await run_lesson(path, time_limit, executed)

    for row in asyncio.as_completed([asyncio.ensure_future(one(path)) for path in paths]):
        yield await row


async def record(out: Path, paths: Sequence[Path], *, jobs: int = 1, **options: object) -> list[Row]:
    """Run lessons and put their rows into the file ``out`` as they come; returns those that failed."""
    kept = {row["lesson"]: row for row in read_results(out).get("rows", [])}
    failed, made = [], provenance() | {"jobs": jobs}
    with tqdm(total=len(paths), desc="lessons", unit="lesson") as bar:
        async for row in run_lessons(paths, jobs=jobs, **options):  # type: ignore[arg-type]
            kept[row["lesson"]] = row | {"date": made["date"], "gpu": made["gpu"]}
            write_results(out, {"provenance": made, "rows": [kept[name] for name in sorted(kept)]})
            failed += [row] if row["error"] else []
            said = f"cell {row['cell']}: {row['error']}" if row["error"] else "passed"
            tqdm.write(f"{row['lesson']}: {row['seconds']:.1f} s, {said}")
            bar.update()
    return failed


def _interruptible(**_: object) -> None:
    """Take nbclient's handler away, which ends the kernel on an interrupt and goes on with the next lesson."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=[], help="how the names of some lessons begin: 03 07")
    parser.add_argument("--jobs", type=int, default=1, help="lessons at a time; with one, times are a lone reader's")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds that each lesson may take")
    parser.add_argument("--executed", type=Path, help="folder for copies with outputs")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs must be 1 or more, got {arguments.jobs}")
    try:
        paths = lessons(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    options = {"time_limit": arguments.time_limit, "executed": arguments.executed}
    try:
        failed = asyncio.run(record(arguments.out, paths, jobs=arguments.jobs, **options))
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {arguments.out} holds the lessons that had ended")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
