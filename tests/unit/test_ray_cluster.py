"""What runs on Ray, on a real one on this machine: started once, as that takes a while, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from labkit.core import ExecutorLost
from labkit.engine import LLM
from labkit.engine.replicas import RayReplicas
from labkit.experiments.fragmentation import final_length_utilisation
from labkit.experiments.sweep import grid, sweep
from labkit.ray_cluster import ray_cluster
from labkit.scheduling import SamplingParams

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = dict(device="cpu", num_gpu_blocks_override=32, max_num_seqs=4)
PROMPTS = [[5, 6, 7] * 8, [9, 9], [5, 6, 7] * 9, [3]]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    folders: list[Path] = []

    def folder_of_ours(**options: Any) -> TemporaryDirectory[str]:
        made = TemporaryDirectory(**options)
        folders.append(Path(made.name))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.ray_cluster.TemporaryDirectory", folder_of_ours)
        with ray_cluster("local") as module:
            (folder,) = folders
            processes = psutil.Process().children(recursive=True)
            yield module
            assert module.is_initialized()  # what joined it has left it
    assert not module.is_initialized() and not folder.exists()
    _, alive = psutil.wait_procs([p for p in processes if _mentions(p, str(folder))], timeout=5)
    assert alive == []


def _mentions(process: psutil.Process, text: str) -> bool:
    try:
        return text in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_sweep_gives_the_table_that_local_processes_give(ray, tmp_path):
    configurations = grid(lengths=("azure_code", "azure_conv"))
    here = sweep(final_length_utilisation, configurations, workers=1, progress=False)
    there = sweep(final_length_utilisation, configurations, folder=tmp_path, ray_address="auto", progress=False)
    pd.testing.assert_frame_equal(here, there)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(RuntimeError, match="1 of 1 runs failed.*'lengths': 'nowhere'.*nowhere") as failed:
        sweep(final_length_utilisation, [{"lengths": "nowhere"}], ray_address="auto", progress=False)
    assert "Traceback" not in str(failed.value)


@pytest.fixture
def model(tiny_llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """One of its own: a model that has once shown its hidden states keeps hooks which nothing can pickle."""
    fresh = LlamaForCausalLM(tiny_llama.config).eval()
    fresh.load_state_dict(tiny_llama.state_dict())
    return fresh


def test_replicas_answer_as_one_engine_does_until_one_dies(ray, model):
    with LLM(model, **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    with RayReplicas(2, model=model, **OPTIONS) as replicas:
        got = replicas.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in got] == expected
        assert replicas.router.loads == [0, 0]
        assert replicas.generate([[5, 6, 7] * 8 + [1]], PARAMS)[0].num_cached_tokens == 16  # where that prefix went
        with pytest.raises(ValueError, match="1000000"):
            replicas.generate([[1_000_000]], PARAMS)
        next(p for p in psutil.Process().children(recursive=True) if _mentions(p, "_Replica")).kill()
        with pytest.raises(ExecutorLost, match="replica [01] of 2 died: make new RayReplicas"):
            replicas.generate(PROMPTS, PARAMS)
        assert replicas.router.loads == [0, 0]
    with pytest.raises(RuntimeError, match="closed"):
        replicas.generate(PROMPTS, PARAMS)


def test_what_an_engine_refuses_is_the_callers_error(ray, model):
    with pytest.raises(ValueError, match="max_num_seqs must be >= 1, got 0"):
        RayReplicas(1, model=model, **OPTIONS | {"max_num_seqs": 0})


def test_a_model_that_cannot_be_sent_says_so(ray, model):
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    with pytest.raises(TypeError, match="name the model, or pass one that has not run yet"):
        RayReplicas(1, model=model, **OPTIONS)
