"""Importing transformers without others' warnings, and loading without a page of log lines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao where that is installed, and Python may warn of its source while it compiles it.
with warnings.catch_warnings():
    for category in (SyntaxWarning, DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", category)
    import transformers.modeling_utils  # noqa: F401
    from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within this block transformers shows errors only, and no progress bars for what takes a second."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
