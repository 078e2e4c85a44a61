"""Loading by name, folder and file: what comes back, and what is refused with which advice. No hub is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from labkit.kv_math import MODEL_SHAPES
from labkit.models import load_model, random_model
from labkit.models.hub import has_all_weights
from labkit.models.random_weights import config_of_shape


@pytest.fixture
def folder(tmp_path, tiny_llama) -> Path:
    """The tiny llama as a folder with safetensors in float32, and a tokenizer of three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny_llama.save_pretrained(tmp_path / "model")
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.inference_mode()
def test_a_folder(folder, tiny_llama):
    model, tokenizer = load_model(folder, device="cpu")
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, tiny_llama(tokens).logits)
    assert tokenizer("b c")["input_ids"] == [1, 2]
    assert not model.training and model.config.name_or_path == str(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "half", torch.float32])
def test_dtypes(folder, dtype):
    expected = {"bfloat16": torch.bfloat16, "half": torch.float16}.get(dtype, dtype)
    assert load_model(str(folder), dtype=dtype, device="cpu")[0].dtype == expected


def test_auto_is_float32_on_a_cpu_whatever_the_checkpoint_says(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert load_model(folder, device="cpu")[0].dtype == torch.float32


def test_another_tokenizer(folder, tmp_path):
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (folder / "tokenizer_config.json").rename(tmp_path / "tokenizer_config.json")
    assert load_model(folder, tokenizer=tmp_path, device="cpu")[1]("c")["input_ids"] == [2]
    with pytest.raises(ValueError, match=r"no tokenizer can be loaded .* pass tokenizer="):
        load_model(folder, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": "int8"}, ValueError, "dtype must be 'auto', 'float32'.*got 'int8'"),
        ({"dtype": torch.int64}, ValueError, "got torch.int64"),
        ({"device": "gpu"}, ValueError, "device must be 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        ({"device": "cuda:99"}, ValueError, "'cuda:99': torch sees"),
        ({"name": ""}, ValueError, "name must be"),
        ({"name": 7}, TypeError, "name must be .* got 7"),
        ({"name": "./nowhere"}, FileNotFoundError, "no file or folder ./nowhere"),
        ({"name": "nowhere.gguf"}, FileNotFoundError, "no file or folder nowhere.gguf"),
        ({"name": "not a name!"}, ValueError, "neither a local folder nor a hub name"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        load_model(**arguments)


def test_pickle_files_are_not_loaded(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only pytorch_model.bin, and pickle files are not loaded"):
        load_model(folder, device="cpu")


def test_a_folder_without_weights_or_config(tmp_path, folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="it has no weights"):
        load_model(folder, device="cpu")
    with pytest.raises(ValueError, match=r"no config.json"):
        load_model(tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"only .gguf files"):
        load_model(folder / "config.json", device="cpu")


def test_an_unsupported_model_is_refused_before_its_weights_are_looked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom", "hidden_size": 64, "n_layer": 2}))
    with pytest.raises(ValueError, match="bloom.*not supported"):
        load_model(tmp_path, device="cpu")


def test_code_in_a_folder_runs_only_when_asked(folder):
    config = json.loads((folder / "config.json").read_text())
    own_code = {"model_type": "own", "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config | own_code))
    (folder / "code.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(folder, device="cpu")


# ---------------------------------------------------------------- the hub, from its cache


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty hub cache, and a hub that cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def _put_into(cache: Path, folder: Path) -> Path:
    snapshot = cache / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (cache / "models--org--tiny" / "refs").mkdir()
    (cache / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    return snapshot


def test_a_model_in_the_hub_cache_needs_no_hub(hub_cache, folder):
    _put_into(hub_cache, folder)
    model, tokenizer = load_model("org/tiny", device="cpu")
    assert model.config.name_or_path == "org/tiny" and tokenizer("b")["input_ids"] == [1]


def test_neither_cached_nor_reachable_says_what_to_do(hub_cache, folder):
    advice = r"(?s)'org/tiny' is not wholly in the local hub cache.*hf download org/tiny.*HF_HOME.*embedded model"
    with pytest.raises(ConnectionError, match=advice):
        load_model("org/tiny", device="cpu")
    (_put_into(hub_cache, folder) / "model.safetensors").unlink()  # an interrupted download
    with pytest.raises(ConnectionError, match=advice):
        load_model("org/tiny", device="cpu")


def test_a_sharded_model_is_whole_only_with_every_shard(folder):
    assert has_all_weights(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not has_all_weights(folder)
    (folder / "model-00002-of-00002.safetensors").touch()
    assert has_all_weights(folder)


# ---------------------------------------------------------------- random weights


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_named_shape_has_exactly_its_parameters(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of_shape(MODEL_SHAPES[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == MODEL_SHAPES[name].num_params


@torch.inference_mode()
def test_random_weights_follow_the_seed_and_leave_the_callers_generator_alone():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    models = [random_model(config, dtype="float32", device="cpu", seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(1), expected)
    tokens = torch.arange(8)[None]
    first, same, other = (model(tokens).logits for model in models)
    assert first.isfinite().all() and torch.equal(first, same) and not torch.equal(first, other)


def test_random_models_of_any_config_and_dtype():
    model = random_model(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2), device="cpu")
    assert model.dtype == torch.bfloat16 and not model.training
    with pytest.raises(ValueError, match="llama-2-7c"):
        random_model("llama-2-7c", device="cpu")
