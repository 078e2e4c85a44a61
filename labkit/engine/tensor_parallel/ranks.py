"""The front's handle on its ranks: start them, talk to them, notice that one died, leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from labkit.core import ExecutorLost

from .interrupts import interrupts_deferred
from .messages import Close, Failed
from .torchrun import accept_ranks, is_torchrun

_SECONDS_TO_CLOSE = 10


class Ranks:
    """``size`` processes, each with a connection to this one.

    Raises ExecutorLost wherever a rank turns out to have ended; by then the others have been killed as well.
    """

    def __init__(self, size: int, device_type: str) -> None:
        """Starts the processes, or under torchrun the first of them; they wait for their :class:`Setup`."""
        self._folder = Path(tempfile.mkdtemp(prefix="labkit-ranks-"))
        # On one host a file: no port to be taken or left open.
        self.init_method = "env://" if is_torchrun() else f"file://{self._folder / 'rendezvous'}"
        pairs = [Pipe() for _ in range(1 if is_torchrun() else size)]
        self.connections: list[Connection] = [ours for ours, _ in pairs]
        theirs = [other.fileno() for _, other in pairs]
        # On a CPU one launcher forks all: they import torch once. On GPUs each rank is an interpreter of its own, as a
        # fork cannot use CUDA once an import has asked for a GPU, and some do (transformers imports torchao).
        launches = [theirs] if device_type == "cpu" else [[descriptor] for descriptor in theirs]
        self._launchers = [_launch(descriptors, device_type) for descriptors in launches]
        for _, other in pairs:
            other.close()
        if is_torchrun():
            self.connections += accept_ranks(size)

    def broadcast(self, message: Any) -> None:
        """Send to every rank. If anything cuts this short the ranks are ended, as they would not be in one step."""
        with interrupts_deferred():
            try:
                for rank in range(len(self.connections)):
                    self._send(rank, message)
            except BaseException:
                self.kill()
                raise

    def send(self, rank: int, message: Any) -> None:
        """Send to one rank."""
        with interrupts_deferred():
            self._send(rank, message)

    def receive(self, rank: int) -> Any:
        """The next message of one rank. Any other that speaks meanwhile has failed."""
        while True:
            for connection in wait(self.connections):
                sender = self.connections.index(connection)  # type: ignore[arg-type]
                message = self._read(sender)
                if sender == rank and not isinstance(message, Failed):
                    return message
                raise self._lost(sender, message if isinstance(message, Failed) else None)

    def receive_all(self) -> list[Any]:
        """One message of every rank, in the order of ranks."""
        messages: dict[int, Any] = {}
        while len(messages) < len(self.connections):
            for connection in wait([c for i, c in enumerate(self.connections) if i not in messages]):
                sender = self.connections.index(connection)  # type: ignore[arg-type]
                message = self._read(sender)
                if isinstance(message, Failed):
                    raise self._lost(sender, message)
                messages[sender] = message
        return [messages[rank] for rank in range(len(messages))]

    def check(self) -> None:
        """Raise ExecutorLost if a rank has ended since."""
        if not self.connections:
            raise ExecutorLost("the ranks of this tensor-parallel model have ended: make a new LLM")
        for connection in wait(self.connections, timeout=0):
            sender = self.connections.index(connection)  # type: ignore[arg-type]
            message = self._read(sender)
            if isinstance(message, Failed):
                raise self._lost(sender, message)

    def forget_rendezvous(self) -> None:
        """Remove the file by which the ranks found each other: not needed once they have joined."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the ranks, by force after a few seconds. Safe to call twice."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(Close())
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        while any(launcher.poll() is None for launcher in self._launchers) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End the ranks now. Safe to call twice."""
        if not self.connections:
            return
        for launcher in self._launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        for launcher in self._launchers:
            launcher.wait()
        for connection in self.connections:
            connection.close()
        self.connections.clear()
        self.forget_rendezvous()

    def _send(self, rank: int, message: Any) -> None:
        try:
            self.connections[rank].send(message)
        except OSError:
            raise self._lost(rank) from None

    def _read(self, rank: int) -> Any:
        try:
            with interrupts_deferred():
                return self.connections[rank].recv()
        except (EOFError, OSError):
            raise self._lost(rank) from None

    def _lost(self, rank: int, failed: Failed | None = None) -> Exception:
        """End everything; the error to raise. A rank's ValueError, such as no room for the pool, speaks to the user."""
        self.kill()
        if failed is None:
            return ExecutorLost(f"rank {rank} of the tensor-parallel model died; all ranks were ended: make a new LLM")
        if isinstance(failed.error, ValueError | NotImplementedError):
            return failed.error
        return ExecutorLost(f"rank {rank} of the tensor-parallel model failed; all ranks were ended.\n{failed.text}")


def _launch(descriptors: list[int], device_type: str) -> subprocess.Popen:
    """A process for the ranks behind ``descriptors``.

    In a session of its own: Ctrl-C stays with the front, and one signal reaches whatever is left of the group.
    """
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.launcher", *map(str, descriptors)],
        pass_fds=descriptors,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env=_environment(device_type),
    )


def _environment(device_type: str) -> dict[str, str]:
    # Else a thread of each rank waits for the rendezvous, which is removed.
    environment = dict(os.environ, TORCH_NCCL_DUMP_ON_TIMEOUT="0")
    package_root = str(Path(__file__).parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    if device_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
