"""KVPlanner and QuantMicroscope as Python sees them: controls lead to numbers, and pages without a kernel show them."""

from __future__ import annotations

import subprocess
import sys
from base64 import b64decode
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from labkit import plan_capacity
from labkit.widgets import KVPlanner, QuantMicroscope
from labkit.widgets.quant_microscope import FORMATS


def test_importing_the_widgets_draws_nothing():
    code = "import ipywidgets, labkit.widgets; print(len(ipywidgets.Widget.widgets))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


# ---------------------------------------------------------------------- planner


def test_the_planner_shows_what_plan_capacity_says():
    planner = KVPlanner(model="llama-2-13b", gpu="a100-40gb", context=4096, batch_size=4)
    expected = plan_capacity("a100-40gb", "llama-2-13b", max_model_len=4096)
    assert planner.plan is not None and planner.plan.rows() == expected.rows()
    assert "does not fit: 3 is the most" in planner.result.value
    planner.batch_size.value = 3
    assert ": fits, 3 would" in planner.result.value


def test_every_control_changes_the_plan():
    planner = KVPlanner(model="llama-2-13b", gpu="h200", context=4096)
    seen = {planner.result.value}
    changes = [("gpu", "a100-80gb"), ("num_gpus", 2), ("kv_dtype", "int8"), ("context", 8192), ("batch_size", 5)]
    for name, value in [*changes, ("utilization", 0.8), ("model", "llama-3-8b")]:
        getattr(planner, name).value = value
        assert planner.result.value not in seen, f"{name} changed nothing"
        seen.add(planner.result.value)


def test_a_model_too_large_is_said_in_words_and_the_planner_recovers():
    planner = KVPlanner(model="llama-2-70b", gpu="l4")
    assert planner.plan is None and planner.error
    assert "Does not fit." in planner.result.value and repr(planner) == f"KVPlanner(llama-2-70b, l4): {planner.error}"
    planner.num_gpus.value, planner.gpu.value = 2, "h200"
    assert planner.plan is not None and planner.error == ""


def test_the_planners_bar_is_as_wide_as_the_gpu():
    planner = KVPlanner(model="llama-2-13b", gpu="a100-40gb", batch_size=2)
    widths = [float(part.split("%")[0]) for part in planner.result.value.split("width:")[1:] if "%" in part[:8]]
    assert sum(widths) == pytest.approx(100, abs=0.05)


@pytest.mark.parametrize("choice", [{"model": "gpt-9"}, {"gpu": "abacus"}, {"context": 4097}])
def test_the_planner_refuses_what_its_menus_do_not_have(choice):
    name, value = next(iter(choice.items()))
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got {value!r}"):
        KVPlanner(**choice)


def test_the_planner_has_text_and_html_for_pages_without_a_kernel():
    bundle = KVPlanner()._repr_mimebundle_()
    assert bundle["text/plain"] == "KVPlanner(llama-2-13b, a100-40gb): see .plan"
    assert "<table" in bundle["text/html"] and "application/vnd.jupyter.widget-view+json" in bundle


# ---------------------------------------------------------------------- microscope


@pytest.fixture
def tiles() -> dict[str, torch.Tensor]:
    tile = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    tile[:, 7] *= 20  # an outlier channel, as keys have
    return {"with an outlier": tile, "small": tile[:4, :32]}


def arrays(microscope: QuantMicroscope) -> tuple[np.ndarray, ...]:
    picture = microscope._picture
    sent = (picture.values, picture.codes, picture.errors)
    return tuple(np.frombuffer(data, np.float32).reshape(picture.shape) for data in sent)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_shown_with_its_error(tiles, format):
    microscope = QuantMicroscope(tiles, format=format)
    values, codes, errors = arrays(microscope)
    assert np.array_equal(values, tiles["with an outlier"].numpy())
    assert np.isfinite(codes).all() and np.isfinite(errors).all()
    assert microscope.relative_error == pytest.approx(np.linalg.norm(errors) / np.linalg.norm(values), rel=1e-4)
    if "int4" in format:
        assert len(np.unique(codes)) <= 16


def test_the_menus_tell_the_lessons_story(tiles):
    microscope = QuantMicroscope(tiles)
    a_token = microscope.relative_error
    microscope.format.value = "int4 with offset, a scale a channel"
    assert microscope.relative_error < a_token / 2, "a scale a channel takes the outlier channel apart"
    microscope.format.value = "int4 symmetric, a scale a token"
    microscope.rotate.value = True
    assert microscope.relative_error < a_token, "rotation spreads the outlier"
    microscope.tile.value = "small"
    assert microscope._picture.shape == [4, 32]


def test_a_change_is_one_message(tiles, monkeypatch):
    microscope, sent = QuantMicroscope(tiles), []
    monkeypatch.setattr(microscope._picture, "_send", lambda message, **_: sent.append(message))
    microscope.tile.value = "small"
    assert len(sent) == 1
    assert set(sent[0]["state"]) == {"shape", "summary"}
    assert sorted(path for (path,) in sent[0]["buffer_paths"]) == ["codes", "errors", "values"]


def test_the_microscope_refuses_what_is_no_tile(tiles):
    with pytest.raises(ValueError, match=r"tiles must be \[num_tokens, head_dim\], 'x' has shape \(3,\)"):
        QuantMicroscope({"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="tiles must hold at least one"):
        QuantMicroscope({})
    with pytest.raises(ValueError, match="format must be one of .* got 'int3'"):
        QuantMicroscope(tiles, format="int3")


def test_zeros_are_drawn_as_well(tiles):
    microscope = QuantMicroscope({"zeros": torch.zeros(4, 32)})
    assert microscope.relative_error == 0
    picture = np.asarray(Image.open(BytesIO(microscope.to_png())))
    assert (picture == 255).all()


def test_the_microscope_has_a_picture_and_a_line_for_pages_without_a_kernel(tiles):
    microscope = QuantMicroscope(tiles)
    bundle = microscope._repr_mimebundle_()
    assert bundle["text/plain"].startswith("QuantMicroscope(with an outlier, int4 symmetric, a scale a token): 4.")
    picture = np.asarray(Image.open(BytesIO(b64decode(bundle["image/png"]))))
    assert picture.shape == (16 * 4, 3 * 64 * 4 + 2 * 12, 3)
    assert len(bundle["image/png"]) < 60_000
