"""Where the files of `data/` are, in a checkout and in an installed package alike."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).parent / "data"  # a symlink in a checkout, a folder of the package once installed


def data_path(name: str) -> Path:
    """The file or folder ``name`` of `data/`, such as "text/persuasion_excerpt_320k.txt".

    Raises FileNotFoundError, naming what stands in the same folder, if there is none.
    """
    path = _DATA / name
    if not path.exists():
        siblings = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        hint = f": that folder holds {', '.join(siblings)}" if siblings else ""
        raise FileNotFoundError(f"labkit has no data file {name!r}{hint}")
    return path
