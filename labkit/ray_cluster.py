"""Ray, for what runs on several machines: joined where it runs, else started on this one and ended again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any


@contextmanager
def ray_cluster(address: str | None = None) -> Iterator[Any]:
    """The module ``ray``, connected.

    A cluster that this process is connected to already is used, and left as it is. Else ``address`` ("auto", "local",
    "ray://host:port"), then the environment's RAY_ADDRESS, then "local": Ray is started on this machine, and when the
    block ends so do its processes, and its sockets and logs are removed. Raises ImportError if Ray is not installed.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("this needs Ray: pip install 'kv-labkit[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    with ExitStack() as stack:
        options = {}
        if address == "local":
            # In /tmp, since the paths of sockets must be short.
            folder = TemporaryDirectory(prefix="labkit-ray-", dir="/tmp", ignore_cleanup_errors=True)
            options = {"_temp_dir": stack.enter_context(folder), "include_dashboard": False}
        stack.callback(ray.shutdown)
        ray.init(address=address, log_to_driver=False, **options)
        yield ray
