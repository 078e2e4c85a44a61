"""Writes docs/parity.md and docs/supported_models.md; takes a minute or two.

python -m tests.parity.make_docs
"""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from . import test_architectures, test_architectures_triton
from .every_architecture import Verdict, verdict
from .tiny_models import TINY

DOCS = Path(__file__).parents[2] / "docs"

KINDS = {
    "llama": "grouped-query attention",
    "qwen2": "biases in the projections of Q, K and V",
    "qwen3": "norms on Q and K",
    "mistral": "sliding window in every layer",
    "gemma2": "window in every other layer, capped logits, its own scale",
    "gemma3": "window and full layers with rotary bases of their own",
    "gpt_oss": "attention sinks, window in every other layer, experts",
    "phi3": "fused QKV projection",
    "gpt2": "learned positions, one KV head for each query head",
    "opt": "learned positions with an offset",
    "olmo2": "norms after attention",
    "deepseek_v3": "latent attention: keys and values of different sizes, experts",
    "stablelm": "rotation of half the head; drops unknown arguments",
    "gemma3n": "layers that read the K and V of earlier ones",
}


def parity_page() -> str:
    """The matrix of contract 3: which kind of attention is compared with transformers in which setting."""
    triton = next(mark for mark in test_architectures_triton.test_same_logits_as_transformers.pytestmark).args[1]
    settings = [*test_architectures.SETTINGS, "prefix cache hits", "alone", "poisoned slots"]
    lines = [
        "# What is compared with transformers",
        "",
        "A tiny random model of each kind runs through `LLM` in fp32, teacher-forced, in each setting: requests of",
        f"{', '.join(map(str, test_architectures.NUM_PROMPT_TOKENS))} prompt tokens together. Every logit is within "
        "1e-4 of what `transformers` gives",
        "for the same sequence alone, without a cache. The embedded SmolLM2-135M-Instruct is compared the same way,",
        "and so are its greedy tokens.",
        "",
        "Settings: " + "; ".join(f"*{name}*: {_options(name)}" for name in test_architectures.SETTINGS) + ".",
        "",
        "| model | what is special | " + " | ".join(settings) + " | Triton in the interpreter |",
        "|---" * (len(settings) + 3) + "|",
    ]
    for name in TINY:
        cells = ["yes"] * len(settings) + ["yes" if name in triton else ""]
        lines.append(f"| {name} | {KINDS[name]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _options(setting: str) -> str:
    options = test_architectures.SETTINGS[setting]
    return ", ".join(f"`{name}={value}`" for name, value in options.items()) or "defaults"


def supported_models_page(verdicts: dict[str, Verdict]) -> str:
    """Every causal language model type of transformers: served, refused, and how we know."""
    served = [name for name, found in verdicts.items() if found.kind == "same"]
    admitted = {name: found for name, found in verdicts.items() if found.kind == "by config"}
    refused = {name: found for name, found in verdicts.items() if found.kind == "refused"}
    lines = [
        "# Which models can be served",
        "",
        f"All {len(verdicts)} types of `AutoModelForCausalLM` in transformers {transformers.__version__}. "
        "`labkit doctor --model NAME` says it of a model",
        "by its own config, which can differ from the default that was looked at here.",
        "",
        f"## Served: {len(served)}",
        "",
        "A small random model of each has the same logits in the engine as in transformers, with chunked prompts and",
        "preemptions.",
        "",
        ", ".join(f"`{name}`" for name in served),
        "",
        f"## Admitted by its config, not tried: {len(admitted)}",
        "",
        *(f"- `{name}`: {found.why}" for name, found in admitted.items()),
        "",
        f"## Refused: {len(refused)}",
        "",
        "| type | why |",
        "|---|---|",
        *(f"| `{name}` | {found.why} |" for name, found in refused.items()),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    logging.set_verbosity_error()
    DOCS.mkdir(exist_ok=True)
    (DOCS / "parity.md").write_text(parity_page())
    verdicts = {name: verdict(name) for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    (DOCS / "supported_models.md").write_text(supported_models_page(verdicts))


if __name__ == "__main__":
    main()
