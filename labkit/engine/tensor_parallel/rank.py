"""The life of a rank: load a shard, build an executor, run the steps that the front sends."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ..build import BuiltEngine, build_engine
from .messages import Close, Collect, Failed, Ready, Reset, Result, Setup, Submit
from .plan_codec import PlanDecoder
from .shard_group import ShardGroup
from .sharded_model import load_shard
from .torchrun import is_torchrun


def run_rank(connection: Connection) -> int:
    """Serve the front until it closes; returns the exit code. The process ends at once if the front is gone."""
    setup: Setup = connection.recv()
    inbox = _receive_in_background(connection)
    try:
        device = _join(setup)
        model = load_shard(setup.source, setup.size, device)
        built = build_engine(model, setup.options, ShardGroup(setup.size))
        fused = built.fused
        connection.send(
            Ready(
                memory=built.memory,
                spec=built.storage.spec,
                backend_name=built.backend_name,
                kv_bytes=built.storage.num_bytes,
                model_name=model.config.name_or_path or type(model).__name__,
                dtype=str(model.dtype).removeprefix("torch."),
                fusion="off" if fused is None else fused.report.reason or "fused",
                has_graphs=built.executor.graphs is not None,
            )
        )
        _serve(connection, inbox, built, setup.rank)
        built.release(model)
        dist.destroy_process_group()
    except BaseException as error:
        with contextlib.suppress(OSError):  # the front has gone
            connection.send(Failed(setup.rank, _sendable(error), traceback.format_exc()))
        return 1
    return 0


def _receive_in_background(connection: Connection) -> queue.SimpleQueue:
    """Messages as they come. A rank that waits in a collective does not see that the front died: this thread does."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                message = connection.recv()
                inbox.put(message)
                if isinstance(message, Close):
                    return
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=receive, daemon=True).start()
    return inbox


def _join(setup: Setup) -> torch.device:
    """Take this rank's device and join the others."""
    if not is_torchrun():
        # What transformers asks the environment.
        os.environ.update(RANK=str(setup.rank), LOCAL_RANK=str(setup.rank), WORLD_SIZE=str(setup.size))
    if setup.source.device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, torch.get_num_threads() // setup.size))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=setup.init_method,
        rank=setup.rank,
        world_size=setup.size,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def _serve(connection: Connection, inbox: queue.SimpleQueue, built: BuiltEngine, rank: int) -> None:
    executor, decoder = built.executor, PlanDecoder()
    while not isinstance(message := inbox.get(), Close):
        match message:
            case Submit(plan):
                executor.submit(decoder.decode(plan))
                if rank > 0:
                    executor.drop_oldest()
            case Collect(number):
                connection.send(Result(number, executor.collect()))
            case Reset():
                executor.reset()


def _sendable(error: BaseException) -> Exception | None:
    try:
        return error if isinstance(error, Exception) and pickle.loads(pickle.dumps(error)) else None
    except Exception:
        return None
