"""Copies of a model that share the requests: which one gets a request, and copies as Ray actors.

::

    with RayReplicas(4, model="org/name", tensor_parallel_size=2) as replicas:      # 8 GPUs of a Ray cluster
        outputs = replicas.generate(prompts, SamplingParams(max_tokens=64))
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from labkit.core import ExecutorLost
from labkit.ray_cluster import ray_cluster
from labkit.scheduling import SamplingParams

from .llm import LLM
from .outputs import RequestOutput

Prompt = str | list[int]


class PrefixRouter:
    """Sends a request to the replica that has seen the longest prefix of it, else to the least loaded one.

    A replica has its prefix cache to itself, so a prompt that begins like an earlier one is cheap only where that one
    ran. A prefix that everybody shares would send everybody to one replica: once that has ``max_lead`` requests more
    under way than the least loaded one, that one takes the request, and has seen the prefix from then on.

    What was seen is remembered as hashes of whole chunks, each together with all before it; the ``memory`` newest of
    every replica. A replica may have evicted what is remembered here: then the choice costs time, never correctness.
    """

    def __init__(self, num_replicas: int, *, chunk_size: int = 16, max_lead: int = 8, memory: int = 100_000) -> None:
        """``chunk_size`` is tokens, or characters where prompts are text. Raises ValueError for numbers below 1."""
        for name, value in dict(
            num_replicas=num_replicas, chunk_size=chunk_size, max_lead=max_lead, memory=memory
        ).items():
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.loads = [0] * num_replicas
        self._chunk_size = chunk_size
        self._max_lead = max_lead
        self._memory = memory
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]

    def route(self, prompt: Sequence[Hashable]) -> int:
        """The replica for ``prompt``, which counts as under way there until :meth:`finish`."""
        hashes = self._hashes(prompt)
        lengths = [self._num_seen(replica, hashes) for replica in range(len(self.loads))]
        least = min(self.loads)
        able = [r for r, load in enumerate(self.loads) if load - least < self._max_lead]
        chosen = max(able, key=lambda r: (lengths[r], -self.loads[r], -r))
        self.loads[chosen] += 1
        self._remember(chosen, hashes)
        return chosen

    def finish(self, replica: int) -> None:
        """A request that was routed to ``replica`` has ended."""
        self.loads[replica] -= 1

    def _hashes(self, prompt: Sequence[Hashable]) -> list[int]:
        hashes, before = [], 0
        for start in range(0, len(prompt) - self._chunk_size + 1, self._chunk_size):
            before = hash((before, tuple(prompt[start : start + self._chunk_size])))
            hashes.append(before)
        return hashes

    def _num_seen(self, replica: int, hashes: Sequence[int]) -> int:
        seen = self._seen[replica]
        return next((i for i, one in enumerate(hashes) if one not in seen), len(hashes))

    def _remember(self, replica: int, hashes: Sequence[int]) -> None:
        seen = self._seen[replica]
        for one in reversed(hashes):  # the beginnings, which more prompts share, are the last to be forgotten
            seen[one] = None
            seen.move_to_end(one)
        while len(seen) > self._memory:
            seen.popitem(last=False)


class RayReplicas:
    """``num_replicas`` engines, each in a Ray actor with the GPUs that its ranks need. Needs the extra ``[ray]``."""

    def __init__(self, num_replicas: int, *, router: PrefixRouter | None = None, **llm_options: Any) -> None:
        """``llm_options`` are those of :class:`LLM`. Ray is joined or started as :func:`ray_cluster` says.

        Raises ImportError if Ray is not installed, ValueError if the cluster is too small, TypeError for a model that
        cannot be sent to another process, and what LLM raises.
        """
        self.router = router or PrefixRouter(num_replicas)
        if len(self.router.loads) != num_replicas:
            raise ValueError(f"router must be for {num_replicas} replicas, got one for {len(self.router.loads)}")
        self._actors: list[Any] = []
        self._on_close = ExitStack()
        self._ray = self._on_close.enter_context(ray_cluster())
        try:
            resources = replica_resources(num_replicas, llm_options, self._ray.cluster_resources())
            actor = self._ray.remote(**resources)(_Replica)
            self._actors = [actor.remote() for _ in range(num_replicas)]
            options = self._sent(llm_options)
            self._results([one.start.remote(options) for one in self._actors])
        except BaseException:
            self.close()
            raise

    def _sent(self, llm_options: dict[str, Any]) -> Any:
        """The options where every replica can read them: once, if a model is in them."""
        try:
            return self._ray.put(llm_options)
        except TypeError as error:  # transformers leaves hooks on a model that was asked for its hidden states
            raise TypeError(
                "the options cannot be sent to another process: name the model, or pass one that has not run yet "
                f"({str(error).splitlines()[0]})"
            ) from error

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Route the prompts, have every replica generate for its share, and return the outputs in their order.

        Raises ExecutorLost if a replica has died; what was routed to it is lost, and so is the call.
        """
        if not self._actors:
            raise RuntimeError("these replicas are closed: make new ones")
        listed = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(listed) != len(prompts):
            raise ValueError(f"params must be one or as many as the {len(prompts)} prompts, got {len(listed)}")
        chosen = [self.router.route(prompt) for prompt in prompts]
        try:
            shares = [[i for i, one in enumerate(chosen) if one == replica] for replica in range(len(self._actors))]
            answers = self._results(
                [
                    actor.generate.remote([prompts[i] for i in share], [listed[i] for i in share])
                    for actor, share in zip(self._actors, shares, strict=True)
                ]
            )
        finally:
            for replica in chosen:
                self.router.finish(replica)
        order = [i for share in shares for i in share]
        outputs = dict(zip(order, (output for answer in answers for output in answer), strict=True))
        return [outputs[i] for i in range(len(prompts))]

    def close(self) -> None:
        """End the actors and their ranks, and Ray if it was started for them. Safe to call twice."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        self._on_close.close()

    def _results(self, references: Sequence[Any]) -> list[Any]:
        """One result of each replica; the first error ends the wait."""
        waiting = list(references)
        while waiting:
            (ready,), waiting = self._ray.wait(waiting, num_returns=1)
            try:
                self._ray.get(ready)
            except self._ray.exceptions.RayActorError as error:
                number = references.index(ready)
                raise ExecutorLost(
                    f"replica {number} of {len(references)} died: make new RayReplicas ({str(error).splitlines()[0]})"
                ) from error
        return self._ray.get(list(references))

    def __enter__(self) -> RayReplicas:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def replica_resources(
    num_replicas: int, llm_options: Mapping[str, Any], cluster: Mapping[str, float]
) -> dict[str, int]:
    """What Ray sets aside for each replica: a core, and a GPU a rank where the cluster has any.

    Raises ValueError if ``cluster`` (its "CPU" and "GPU") has too few, since Ray would wait for them forever.
    """
    needed = {"num_cpus": 1, "num_gpus": 0}
    if llm_options.get("device") != "cpu" and cluster.get("GPU", 0):
        needed["num_gpus"] = llm_options.get("tensor_parallel_size", 1)
    for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        there = int(cluster.get(resource, 0))
        if num_replicas * needed[name] > there:
            raise ValueError(
                f"num_replicas must be <= {there // needed[name]}, got {num_replicas}: each needs {needed[name]} "
                f"{resource}s, and the Ray cluster has {there}"
            )
    return needed


class _Replica:
    """What runs in an actor."""

    def start(self, llm_options: dict[str, Any]) -> None:
        self._llm = LLM(**llm_options)

    def generate(self, prompts: list[Prompt], params: list[SamplingParams | None]) -> list[RequestOutput]:
        if not prompts:
            return []
        return self._llm.generate(prompts, [one or SamplingParams() for one in params], use_tqdm=False)
