"""Uptraining: the loss falls, a run that was interrupted ends where an uninterrupted one does, bad input is refused."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from labkit.experiments.uptrain import UptrainSettings, uptrain
from labkit.models import convert_kv_heads

TOKENS = torch.randint(1, 120, (16 * 24,), generator=torch.Generator().manual_seed(0)).tolist()
SHORT = UptrainSettings(steps=24, ctx=24, batch_size=4, lr=3e-3)


@pytest.fixture
def mqa(tiny_llama: PreTrainedModel) -> PreTrainedModel:
    return convert_kv_heads(tiny_llama, 1, "mean")[0]


def weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("distil", [True, False])
def test_the_loss_falls(tiny_llama: PreTrainedModel, mqa: PreTrainedModel, distil: bool) -> None:
    original = weights(tiny_llama)
    losses = uptrain(mqa, TOKENS, SHORT, teacher=tiny_llama if distil else None)
    assert len(losses) == 24
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert all(torch.equal(a, b) for a, b in zip(original, weights(tiny_llama), strict=True))


def test_a_perfect_student_has_no_loss(tiny_llama: PreTrainedModel) -> None:
    losses = uptrain(copy.deepcopy(tiny_llama), TOKENS, UptrainSettings(steps=1, ctx=24), teacher=tiny_llama)
    assert losses[0] == pytest.approx(0, abs=1e-6)


def test_an_interrupted_run_ends_with_the_same_weights(
    tiny_llama: PreTrainedModel, mqa: PreTrainedModel, tmp_path: Path
) -> None:
    fresh = copy.deepcopy(mqa)
    losses = uptrain(mqa, TOKENS, SHORT, teacher=tiny_llama)

    def stop(step: int) -> None:
        if step == 13:
            raise KeyboardInterrupt

    options = dict(teacher=tiny_llama, checkpoint=tmp_path, checkpoint_every=5)
    with pytest.raises(KeyboardInterrupt):
        uptrain(copy.deepcopy(fresh), TOKENS, SHORT, on_step=stop, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    (tmp_path / "step-00000012.partial").mkdir()  # the process died while it wrote
    steps = []
    resumed = uptrain(fresh, TOKENS, SHORT, on_step=steps.append, **options)
    assert steps[0] == 11 and resumed == losses
    assert all(torch.equal(a, b) for a, b in zip(weights(mqa), weights(fresh), strict=True))
    assert uptrain(fresh, TOKENS, SHORT, **options) == losses  # nothing is left to do
    assert not list(tmp_path.glob("*.pt")) and not list(tmp_path.glob("*.pkl"))


def test_a_checkpoint_of_other_settings_is_refused(mqa: PreTrainedModel, tmp_path: Path) -> None:
    uptrain(mqa, TOKENS, UptrainSettings(steps=2, ctx=24), checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"other settings: steps is 3, there 2; lr is 0.1, there 0.001"):
        uptrain(mqa, TOKENS, UptrainSettings(steps=3, ctx=24, lr=0.1), checkpoint=tmp_path)


def test_the_learning_rate_rises_and_falls() -> None:
    settings = UptrainSettings(steps=100, lr=1.0, warmup_share=0.1)
    rates = [settings.lr_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.11


def test_every_window_is_seen_once_an_epoch() -> None:
    from labkit.experiments.uptrain import _batches

    settings = UptrainSettings(steps=8, batch_size=4)
    seen = [rows.tolist() for rows in _batches(16, settings, 0)]
    first, second = ([n for rows in half for n in rows] for half in (seen[:4], seen[4:]))
    assert sorted(first) == sorted(second) == list(range(16)) and first != second
    assert [rows.tolist() for rows in _batches(16, settings, 3)] == seen[3:]


def test_bad_input_is_refused(tiny_llama: PreTrainedModel, mqa: PreTrainedModel) -> None:
    for wrong in (dict(steps=0), dict(steps=1, ctx=1), dict(steps=1, batch_size=0), dict(steps=1, lr=0)):
        with pytest.raises(ValueError, match=f"{list(wrong)[-1]} must be"):
            UptrainSettings(**wrong)
    with pytest.raises(ValueError, match="token_ids must fill one window of ctx=1024 tokens, got 384"):
        uptrain(mqa, TOKENS, UptrainSettings(steps=1))
    with pytest.raises(ValueError, match="model must be float32 to be trained, got torch.bfloat16"):
        uptrain(copy.deepcopy(mqa).bfloat16(), TOKENS, SHORT)
    with pytest.raises(ValueError, match="teacher must be another model"):
        uptrain(mqa, TOKENS, SHORT, teacher=mqa)


def test_a_loss_that_is_not_finite_ends_the_run(mqa: PreTrainedModel) -> None:
    with pytest.raises(FloatingPointError, match="lower lr"):
        uptrain(mqa, TOKENS, UptrainSettings(steps=20, ctx=24, lr=math.inf))
