"""Several ranks give the answers of one, and leave nothing behind however they end.

Processes on a CPU with gloo stand for GPUs with NCCL.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from labkit.core import ExecutorLost
from labkit.engine import LLM, RequestOutput
from labkit.engine.tensor_parallel import ShardedEngine, build
from labkit.engine.tensor_parallel.ranks import Ranks
from labkit.scheduling import SamplingParams

from .tiny_models import TINY, VOCAB_SIZE

OPTIONS = dict(num_gpu_blocks_override=64, max_num_seqs=4, max_num_batched_tokens=16)  # the long prompt comes in chunks
PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 11] * 10, [17]]
EVERYTHING = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, logprobs=VOCAB_SIZE, prompt_logprobs=VOCAB_SIZE
)


def engine(name: str, size: int, **options: object) -> LLM:
    return LLM(TINY[name](), tensor_parallel_size=size, **(OPTIONS | options))


@pytest.fixture(scope="module")
def llama() -> Iterator[LLM]:
    """One engine on two ranks for all tests that do not break it."""
    with engine("llama", 2) as llm:
        yield llm
    assert processes_of_ranks() == []


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test starts, processes and temporary folders, must be gone when it ends."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = processes_of_ranks(), shared_memory()
    yield
    left = [process for process in processes_of_ranks() if process not in before[0]]
    for process in left:
        process.kill()
    assert left == []
    assert list(folder.glob("labkit-ranks-*")) == []
    assert shared_memory() <= before[1]


def shared_memory() -> set[str]:
    """What torch's process groups leave in shared memory; other programs of this machine have theirs there too."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("nccl", "torch", "gloo"))}


def processes_of_ranks() -> list[psutil.Process]:
    """Launchers and ranks that this process has started."""
    return [p for p in psutil.Process().children(recursive=True) if "labkit.engine.tensor_parallel" in _command(p)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def logprobs(output: RequestOutput) -> torch.Tensor:
    """[num_positions, vocab_size]: of the prompt's tokens after the first, then of the generated ones."""
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([[row[token].logprob for token in range(VOCAB_SIZE)] for row in rows])  # type: ignore[index]


def compare(llm: LLM, name: str, num_ranks_of_a_head: int = 1) -> None:
    """``llm`` against the same model on one rank: logits of prompts and of generated tokens, and the pool."""
    with LLM(TINY[name](), **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, EVERYTHING, use_tqdm=False)
        pool = alone.memory.kv_pool
    got = llm.generate(PROMPTS, EVERYTHING, use_tqdm=False)
    for one, other in zip(got, expected, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert (logprobs(one) - logprobs(other)).abs().max() < 1e-4
    sharded = llm._built
    assert isinstance(sharded, ShardedEngine)
    assert llm.memory.kv_pool == pool * num_ranks_of_a_head // len(sharded.ready)
    assert {ready.kv_bytes for ready in sharded.ready} == {llm.memory.kv_pool}
    unfused = "Gemma2DecoderLayer is not one of the known Llama-structured layers"
    assert all(
        ready.fusion.startswith("layer 0: " + unfused if name == "gemma2" else "fused") for ready in sharded.ready
    )
    llm.engine.scheduler.kv.check()


def test_llama_on_two_ranks_has_the_logits_of_one(llama):
    compare(llama, "llama")


def test_sampling_prefix_cache_and_forks_on_two_ranks(llama):
    params = [
        SamplingParams(temperature=1, seed=3, max_tokens=8, n=2),
        SamplingParams(temperature=1, seed=4, max_tokens=8),
    ]
    prompts = [[3, 4, 11] * 10, [3, 4, 11] * 10 + [5]]

    def run(llm: LLM) -> list[list[list[int]]]:
        rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        assert rounds[1][1].num_cached_tokens > 0
        return [[completion.token_ids for completion in output.outputs] for output in rounds[0] + rounds[1]]

    with LLM(TINY["llama"](), **OPTIONS) as alone:
        expected = run(alone)
    assert run(llama) == expected


def test_steps_that_begin_before_the_last_one_is_known(llama, monkeypatch):
    params = [SamplingParams(temperature=1, seed=n, max_tokens=4 + n, ignore_eos=True) for n in range(6)]
    prompts = [[3, 4, 11] * (n + 1) for n in range(6)]
    expected = llama.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(llama.engine.executor, "depth", 2)  # as on a GPU: ranks find the newest tokens on their device
    got = llama.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Python's own handler: what runs in the background of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_between_the_messages_of_a_step_leaves_the_ranks_in_one_step(llama, monkeypatch):
    expected = answer(llama)
    ranks = llama._built.ranks
    for rank in range(2):
        stream = llama.stream([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        next(stream)
        with monkeypatch.context() as patched:
            others = [_Interrupting(own) if r == rank else own for r, own in enumerate(ranks.connections)]
            patched.setattr(ranks, "connections", others)
            with pytest.raises(KeyboardInterrupt):
                list(stream)
        llama.engine.scheduler.kv.check()
        assert not llama.engine.has_unfinished
        assert answer(llama) == expected


class _Interrupting:
    """A connection; Ctrl-C comes right after its first message."""

    def __init__(self, connection):
        self._connection = connection
        self._has_interrupted = False

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def send(self, message):
        self._connection.send(message)
        if not self._has_interrupted:
            self._has_interrupted = True
            signal.raise_signal(signal.SIGINT)


SCRIPT = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from labkit import LLM, SamplingParams
from tests.parity.tiny_models import TINY
with LLM(TINY["llama"](), tensor_parallel_size=2, num_gpu_blocks_override=64, max_num_seqs=4) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
    print(llm.generate([[5, 6, 7, 8, 9]], params, use_tqdm=False)[0].outputs[0].token_ids, flush=True)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        time.sleep(60)
print("after close")
"""
"""Without a main guard, which multiprocessing would need."""


def test_ranks_end_when_the_front_is_killed(no_leftovers):
    front = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None and front.stdout.readline().startswith("[")
    ranks = psutil.Process(front.pid).children(recursive=True)
    assert len(ranks) == 3
    front.kill()
    front.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    for process in alive:
        process.kill()
    assert alive == []


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_the_script_goes_on_once(llama, tmp_path, no_leftovers):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(answer(llama)), "after close"]


@pytest.mark.parametrize(("name", "size", "num_ranks_of_a_head"), [("qwen3", 2, 1), ("gemma2", 2, 1), ("llama", 4, 2)])
def test_other_models_and_more_ranks_than_kv_heads(name, size, num_ranks_of_a_head, no_leftovers):
    llm = engine(name, size)
    compare(llm, name, num_ranks_of_a_head)
    del llm  # without close
    gc.collect()


@pytest.mark.slow
def test_in_a_notebook(llama, no_leftovers):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    made, rest = SCRIPT.split("with ")
    made += f"llm = {rest.split(' as ')[0]}"
    cells = [
        made,
        "llm.generate([[5, 6, 7, 8, 9]], SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids",
        "llm.close()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=100).execute(cwd=os.getcwd())
    assert notebook.cells[1].outputs[-1]["data"]["text/plain"] == str(answer(llama))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_raises_within_seconds_and_takes_its_engine_along_but_no_other(llama, rank, no_leftovers):
    expected = answer(llama)
    others = processes_of_ranks()
    llm = engine("llama", 2)
    assert answer(llm) == expected
    launcher = next(p for p in processes_of_ranks() if p not in others and p.children())
    stream = llm.stream(PROMPTS, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    os.kill(sorted(child.pid for child in launcher.children())[rank], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(ExecutorLost, match="rank [01] of the tensor-parallel model died"):
        list(stream)
    assert time.monotonic() - begin < 5
    assert processes_of_ranks() == others
    llm.engine.scheduler.kv.check()
    assert not llm.engine.has_unfinished
    with pytest.raises(ExecutorLost, match="make a new LLM"):
        answer(llm)
    llm.close()
    assert answer(llama) == expected


MARKS_FORKS = """
import os
import torch

def spoil():
    torch.cuda._is_in_bad_fork = lambda: True
    torch.distributed.init_process_group = lambda *args, **options: torch.cuda.init()

os.register_at_fork(after_in_child=spoil)
"""
"""What torch does in a fork of a process where an import asked for a GPU, with ranks that use it though on a CPU."""


@pytest.mark.slow
def test_ranks_on_gpus_are_no_forks_and_end_together(tmp_path, monkeypatch, no_leftovers, llama):
    """Which could not use CUDA once an import has asked for a GPU, as that of torchao does."""
    (tmp_path / "sitecustomize.py").write_text(MARKS_FORKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ExecutorLost, match="Cannot re-initialize CUDA in forked subprocess"):
        engine("llama", 2)
    monkeypatch.setattr(build, "Ranks", lambda size, _: Ranks(size, "cuda"))
    others = processes_of_ranks()
    with engine("llama", 2) as llm:
        assert len([process for process in processes_of_ranks() if process not in others]) == 2
        assert answer(llm) == answer(llama)
    assert processes_of_ranks() == others
    with engine("llama", 2) as llm:
        ranks = [process for process in processes_of_ranks() if process not in others]
        ranks[1].kill()
        with pytest.raises(ExecutorLost, match="rank [01] of the tensor-parallel model"):
            answer(llm)
        assert processes_of_ranks() == others


def test_an_error_while_ranks_are_made_is_the_callers(no_leftovers):
    with pytest.raises(ValueError, match="num_gpu_blocks_override=999999999"):
        engine("llama", 2, num_gpu_blocks_override=999_999_999)


def answer(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=4)
    return llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids
