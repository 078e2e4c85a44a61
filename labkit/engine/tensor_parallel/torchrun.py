"""Ranks that torchrun started, on one host or several.

    torchrun --nnodes 2 --nproc-per-node 8 ... script.py        the script makes LLM(tensor_parallel_size=16)

Every process runs the script. In process 0 ``LLM`` is the front, and rank 0 is a child of it on the same GPU; in every
other process ``LLM(...)`` becomes a rank and ends the process when the front closes, so what follows it in the script
runs once. One LLM a script.
"""

from __future__ import annotations

import os
import secrets
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.distributed as dist

_KEY = "labkit/front"


def is_torchrun() -> bool:
    """Whether torchrun started this process, or one that it comes from."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def require_world(size: int) -> int:
    """The ranks on this host. Raises ValueError unless torchrun started ``size`` processes."""
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != size:
        raise ValueError(f"tensor_parallel_size must be {world_size}, the processes that torchrun started, got {size}")
    return int(os.environ["LOCAL_WORLD_SIZE"])


def is_on_one_host() -> bool:
    """Whether all ranks see the same temporary folders."""
    return not is_torchrun() or os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]


def become_rank() -> None:
    """In all processes of torchrun but the first: serve the front, then end the process. Else nothing."""
    if not is_torchrun() or os.environ["RANK"] == "0":
        return
    from .rank import run_rank  # imports the engine, which imports this

    host, port, key = _store().get(_KEY).decode().split("|")
    connection = Client((host, int(port)), authkey=bytes.fromhex(key))
    connection.send(int(os.environ["RANK"]))
    raise SystemExit(run_rank(connection))  # type: ignore[arg-type]


def accept_ranks(size: int) -> list[Connection]:
    """In the first process: connections to ranks 1 ... ``size`` - 1, in that order, when all have called."""
    key = secrets.token_bytes(32)
    connections: dict[int, Connection] = {}
    with Listener((os.environ["MASTER_ADDR"], 0), authkey=key, backlog=size) as listener:
        host, port = listener.address  # type: ignore[misc]
        _store().set(_KEY, f"{host}|{port}|{key.hex()}")
        while len(connections) < size - 1:
            connection = listener.accept()
            connections[connection.recv()] = connection
    return [connections[rank] for rank in range(1, size)]


def _store() -> Any:
    """The key-value store that torchrun keeps for its processes."""
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
