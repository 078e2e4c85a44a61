"""``python -m labkit.engine.tensor_parallel.launcher FD...``: one process that becomes a rank for each connection.

torch and transformers are imported once, then the ranks are forked; for a single connection the process itself is the
rank. A process of its own, not multiprocessing: nothing of the caller's ``__main__`` runs again, so it works in
notebooks and in scripts without a guard. When a forked rank dies the others, which wait for it in some collective, are
killed.
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from transformers import LlamaForCausalLM  # noqa: F401  imports what most models need

from .rank import run_rank


def main(descriptors: list[int]) -> int:
    """Be the only rank, or fork the ranks and wait for them: 1 as soon as one has failed, else 0."""
    if len(descriptors) == 1:
        _become_rank(descriptors[0])
    ranks = []
    for own in descriptors:
        pid = os.fork()
        if pid == 0:
            for other in descriptors:
                if other != own:
                    os.close(other)  # or the front would not see that rank's end close
            _become_rank(own)
        ranks.append(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            for other in ranks:
                os.waitpid(other, 0)
            return 1
    return 0


def _become_rank(descriptor: int) -> NoReturn:
    """Serve the front and end the process: what the launcher would do at exit is not the rank's."""
    code = 1
    try:
        code = run_rank(Connection(descriptor))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    os._exit(main([int(argument) for argument in sys.argv[1:]]))  # without unloading torch, which takes a second
