"""Every widget of the lab in one notebook, with an exercise: what the browser tests operate."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

ENGINE = """
import torch
from labkit import LLM, SamplingParams
from labkit.widgets import BlockTable, KVPlanner, LiveMonitor, QuantMicroscope

llm = LLM(num_gpu_blocks_override=48, max_model_len=256)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
prompts = ["Once upon a time", "The moon is", "A list of"]
"""

MICROSCOPE = """
tile = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
tile[:, 7] *= 20
QuantMicroscope({"with an outlier": tile, "small": tile[:8, :32]})
"""

EXERCISE = """
from labkit import exercises

def bytes_per_token(num_layers, num_kv_heads, head_dim, bytes_per_value): ...

exercises.check("01-bytes-per-token", bytes_per_token)
"""

CELLS = {
    "engine": ENGINE,
    "planner": 'KVPlanner(model="llama-2-13b", gpu="a100-40gb", context=4096, batch_size=4)',
    "microscope": MICROSCOPE,
    "monitor": "monitor = LiveMonitor(llm)\nmonitor",
    "run": "monitor.run(llm.stream(prompts, params))",
    "wait": "outputs = monitor.wait()\nprint(sum(len(output.outputs[0].token_ids) for output in outputs))",
    "player": "BlockTable.from_trace(llm.trace)",
    "exercise": EXERCISE,
}


def write_gallery(path: Path) -> str:
    """Write the notebook; returns its name."""
    return write_notebook(path, *CELLS.values())


def write_notebook(path: Path, *cells: str) -> str:
    """A notebook of code cells on the standard kernel; returns its name."""
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = new_notebook(cells=[new_code_cell(cell.strip()) for cell in cells], metadata={"kernelspec": kernel})
    nbformat.write(made, path)
    return path.name
