"""`labkit doctor --model NAME`: whether a model can be served, why not, what a token takes and how many fit."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch
from transformers import FalconConfig, LlamaConfig, PreTrainedConfig

from labkit import cli
from labkit.model_report import model_report

from .gguf_writer import F32, write_gguf
from .gguf_writer import LLAMA as LLAMA_FILE

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES, intermediate_size=96, num_key_value_heads=2, max_position_embeddings=256)


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """A CPU with 8 GiB left."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: namedtuple("M", "total available")(16 << 30, 8 << 30))


def folder(tmp_path: Path, config: PreTrainedConfig) -> str:
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def doctor(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    monkeypatch.setattr(sys, "argv", ["labkit", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_a_model_that_can_be_served(tmp_path, monkeypatch, capsys):
    code, out, err = doctor(monkeypatch, capsys, "--model", folder(tmp_path, LLAMA))
    assert (code, err) == (0, "")
    assert "llama: supported" in out
    assert "768 B a token" in out  # 3 layers x (K and V) x 2 heads x 16 x 4 bytes
    assert "tokens in a pool of 2.00 GiB on cpu" in out  # a quarter of what the weights leave of 8 GiB
    assert "of 256 tokens" in out


def test_a_model_that_is_refused(tmp_path, monkeypatch, capsys):
    code, out, err = doctor(monkeypatch, capsys, "--model", folder(tmp_path, FalconConfig(**SIZES)))
    assert (code, err) == (1, "")
    assert "falcon: not supported: does not call attention through transformers' interface" in out
    assert "tokens" not in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "there is no file or folder /no/such/folder"),
        ("missing.gguf", "there is no file or folder missing.gguf"),
        ("no/such-model", "the hub cannot be reached"),
        ("", "name must be a hub name, a folder, a .gguf file or None, got ''"),
    ],
)
def test_a_name_that_leads_nowhere(monkeypatch, capsys, name, message):
    code, out, err = doctor(monkeypatch, capsys, "--model", name)
    assert (code, out) == (2, "")
    assert err.startswith("labkit: ") and message in err and "Traceback" not in err


def test_without_a_name_the_embedded_model_follows_the_machine(monkeypatch, capsys):
    code, out, _ = doctor(monkeypatch, capsys)
    assert code == 0
    assert "transformers" in out and "SmolLM2-135M-Instruct\nserved       llama: supported" in out
    assert "46,080 B a token" in out  # 30 layers x (K and V) x 3 heads x 64 x 4 bytes


def test_a_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA_FILE, {"token_embd.weight": (F32, (9, 32), bytes(9 * 32 * 4))})
    report = model_report(path)
    assert report.support.supported and report.plan is not None
    assert report.plan.spec.bytes_per_token == 256  # 2 layers x (K and V) x 2 heads x 8 x 4 bytes


def test_a_model_too_big_for_the_machine_says_by_how_much(tmp_path):
    big = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    text = repr(model_report(folder(tmp_path, big)))
    assert "fits         no: " in text and "too little memory on cpu" in text
