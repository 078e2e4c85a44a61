"""Uptraining: a short run that gives a model back what a conversion of its KV heads took.

    ids ─┬─► model    ─► logits, hidden states ─┐
         └─► teacher  ─► logits, hidden states ─┴─► KL + relative error of every layer's output ─► AdamW
             (the original; without one: next-token loss)

Distillation tells every layer what it used to compute, and every position the whole distribution: in a budget of
minutes it recovers much more than the next token alone (docs/heads.md), and it cannot make the model better than the
original on a text that happens to resemble the training text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from . import uptrain_checkpoint as checkpoints


@dataclass(frozen=True, slots=True)
class UptrainSettings:
    """What determines the result of a run, together with the model, the text and the teacher.

    steps: updates, each over batch_size windows of ctx tokens. lr: the peak; it rises over the first
    warmup_share of the steps and falls to a tenth of it as a cosine. hidden_weight: of the layers' relative error
    beside the KL divergence. seed: of the order of the windows.
    """

    steps: int
    ctx: int = 1024
    batch_size: int = 16
    lr: float = 1e-3
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    hidden_weight: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (("steps", 1), ("ctx", 2), ("batch_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} must be an int of at least {lowest}, got {value!r}")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr!r}")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share must be in [0, 1), got {self.warmup_share!r}")

    def lr_at(self, step: int) -> float:
        """The learning rate of update ``step``, counted from 0."""
        warmup = math.ceil(self.warmup_share * self.steps)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.ctx


def uptrain(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    settings: UptrainSettings,
    *,
    teacher: PreTrainedModel | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int = 200,
    on_step: Callable[[int], object] | None = None,
    progress: str | None = None,
) -> list[float]:
    """Train all weights of ``model`` in place; returns the loss of every step, in nats a token.

    Args:
        model: float32, which keeps the small updates; on a GPU, matrix products run in bfloat16 (autocast).
        token_ids: the training text. Windows of ctx tokens, in an order drawn anew for each epoch; what does not fill
            a window is left out. Keep the text that you will measure apart.
        teacher: the model to imitate, with the same layers and vocabulary; None trains on the next token. transformers
            leaves hooks on it, so that an ``LLM`` made of it later runs its layers unfused.
        checkpoint: a folder. A run that finds a checkpoint of the same settings there goes on from it, and ends with
            the weights of an uninterrupted run (bit for bit on a CPU; GPU kernels add in no fixed order).
        on_step: called with the number of updates made, after each; may evaluate the model.
        progress: names a bar, with loss and tokens/s.

    Raises ValueError for a model that is not float32, for too short a text, for a teacher of other sizes and for a
    checkpoint of other settings; FloatingPointError if the loss is no longer finite.
    """
    _check(model, token_ids, settings, teacher)
    windows = torch.tensor(token_ids[: len(token_ids) // settings.ctx * settings.ctx]).view(-1, settings.ctx)
    windows = windows.to(model.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
    )
    described = asdict(settings) | {"teacher": teacher is not None, "windows": len(windows)}
    losses = checkpoints.load(checkpoint, model, optimizer, described) if checkpoint else []
    waiting: list[torch.Tensor] = []  # losses that are still on the device
    begin, first = time.perf_counter(), len(losses)
    with tqdm(total=settings.steps, initial=first, desc=progress, unit="step", disable=progress is None) as bar:
        for step, rows in enumerate(_batches(len(windows), settings, first), start=first):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr_at(step)
            waiting.append(_update(model, teacher, optimizer, windows[rows], settings))
            last, bar_due = step + 1 == settings.steps, (step + 1) % 10 == 0
            save_due = checkpoint is not None and ((step + 1) % checkpoint_every == 0 or last)
            if last or bar_due or save_due:
                losses += torch.stack(waiting).tolist()
                waiting.clear()
                if not math.isfinite(losses[-1]):
                    raise FloatingPointError(f"the loss is {losses[-1]} at step {step + 1}: lower lr ({settings.lr})")
                rate = (step + 1 - first) * settings.tokens_per_step / (time.perf_counter() - begin)
                bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{rate:,.0f}", refresh=False)
            bar.update()
            if checkpoint is not None and save_due:
                checkpoints.save(checkpoint, model, optimizer, described, losses)
            if on_step is not None:
                on_step(step + 1)
    return losses


def _check(
    model: PreTrainedModel, token_ids: Sequence[int], settings: UptrainSettings, teacher: PreTrainedModel | None
) -> None:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        raise ValueError(f"model must be float32 to be trained, got {', '.join(sorted(map(str, dtypes)))}")
    if len(token_ids) < settings.ctx:
        raise ValueError(f"token_ids must fill one window of ctx={settings.ctx} tokens, got {len(token_ids)}")
    if teacher is not None:
        if teacher is model:
            raise ValueError("teacher must be another model than the one that is trained")
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            ours, theirs = (getattr(m.config.get_text_config(decoder=True), name) for m in (model, teacher))
            if ours != theirs:
                raise ValueError(f"teacher must have the model's {name} of {ours}, got {theirs}")


def _batches(num_windows: int, settings: UptrainSettings, first: int) -> Iterator[torch.Tensor]:
    """The window numbers of updates ``first``, ``first`` + 1, ...: a function of seed and step alone."""
    generator, epochs = torch.Generator(), {}

    def order(epoch: int) -> torch.Tensor:
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = torch.randperm(
                num_windows, generator=generator.manual_seed(settings.seed * 100_003 + epoch)
            )
        return epochs[epoch]

    for step in range(first, settings.steps):
        drawn = range(step * settings.batch_size, (step + 1) * settings.batch_size)
        yield torch.stack([order(n // num_windows)[n % num_windows] for n in drawn])


def _update(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    settings: UptrainSettings,
) -> torch.Tensor:
    """One step; its loss, which stays on the device."""
    with _autocast(ids.device):
        if teacher is None:
            loss = next_token_loss(model, ids)
        else:
            loss = distillation_loss(model, teacher, ids, settings.hidden_weight)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of the tokens [batch, ctx], the first of each window left out."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def distillation_loss(
    model: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor, hidden_weight: float
) -> torch.Tensor:
    """KL(teacher || model) a token, plus ``hidden_weight`` times the relative squared error of the layers' outputs.

    The error is taken for each token apart: the few tokens with huge activations would drown the others.
    """
    call: dict[str, Any] = dict(input_ids=ids, use_cache=False, output_hidden_states=hidden_weight > 0)
    with torch.no_grad():
        target = teacher(**call)
    ours = model(**call)
    logits, wanted = (out.logits.flatten(0, 1).float().log_softmax(-1) for out in (ours, target))
    loss = F.kl_div(logits, wanted, reduction="batchmean", log_target=True)
    if hidden_weight > 0:
        errors = [
            ((h - t).square().sum(-1) / t.square().sum(-1)).mean()
            for h, t in zip(ours.hidden_states[1:], target.hidden_states[1:], strict=True)
        ]
        loss = loss + hidden_weight * torch.stack(errors).mean()
    return loss


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
