"""Where a coarse K fails, as directions that must hold: outlier channels, and a bias of k_proj."""

from __future__ import annotations

import pytest
import torch

from labkit.experiments.kv_failures import (
    failure_table,
    key_bias,
    key_bias_quality,
    key_errors,
    outlier_ratio,
    synthetic_keys,
)
from labkit.experiments.recorded import results

SYMMETRIC = "int4 per token-head, symmetric"
ROTATED = "int4 per token-head, symmetric, rotated"
PER_CHANNEL = "int4 per channel, asymmetric"


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    """Score error by case and policy."""
    return {
        case: dict(key_errors(q, k)[["policy", "score_error"]].itertuples(index=False, name=None))
        for case, (q, k) in synthetic_keys().items()
    }


def test_without_outliers_the_axis_hardly_matters(errors):
    gaussian = errors["Gaussian"]
    assert gaussian[SYMMETRIC] < 1.5 * gaussian[PER_CHANNEL]
    assert gaussian["int8 per token-head"] < gaussian[SYMMETRIC] / 10


def test_outlier_channels_ruin_scales_per_token_and_spare_those_per_channel(errors):
    outliers = errors["outlier channels"]
    assert outliers[SYMMETRIC] > 2 * outliers[PER_CHANNEL]
    assert outliers[SYMMETRIC] > 2 * outliers[ROTATED]  # the rotation spreads them
    assert outliers[PER_CHANNEL] < outliers["int4 asymmetric, groups of 32"] < outliers[SYMMETRIC]


def test_a_constant_offset_is_what_a_zero_point_per_channel_takes_away(errors):
    offset = errors["constant offset"]
    assert offset[PER_CHANNEL] < 1.1 * errors["Gaussian"][PER_CHANNEL]
    assert offset[SYMMETRIC] > 5 * offset[PER_CHANNEL]
    assert offset["int4 per channel, symmetric"] > 2 * offset[PER_CHANNEL]


def test_a_key_bias_leaves_and_the_model_is_as_before(tiny_llama):
    tokens = torch.arange(1, 40)[None]
    with torch.inference_mode():
        before = tiny_llama(tokens).logits
        with key_bias(tiny_llama, 5.0):
            biased = tiny_llama(tokens).logits
        assert not torch.allclose(biased, before)
        assert torch.equal(tiny_llama(tokens).logits, before)
    assert tiny_llama.model.layers[0].self_attn.k_proj.bias is None


def test_tables_are_tidy(tiny_llama):
    tokens = torch.randint(1, 120, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    table = failure_table(tiny_llama, tokens[:64])
    assert len(table["case"].unique()) == 4 and not table.isna().any().any()
    rows = key_bias_quality(tiny_llama, tokens, [0.0, 8.0], text="random", ctx=64)
    assert {row["key_bias"] for row in rows} == {0.0, 8.0} and len(rows) == 2 * 8
    assert all(row["dnll"] == 0 for row in rows if row["policy"] == "unquantised")


def test_the_outlier_ratio_is_that_of_the_worst_head():
    k = torch.ones(4, 2, 8)
    k[2, 1, 3] = -6.0
    assert outlier_ratio(k) == 6.0
    with pytest.raises(ValueError, match="k_proj"), key_bias(torch.nn.Linear(2, 2), 1.0):
        pass


def test_the_recorded_losses_have_the_same_direction():
    biased = results("kv_failures.json")["key_bias"]
    rows = {row["policy"]: row for row in biased if row["key_bias"] == 40}
    plain = {row["policy"]: row for row in biased if row["key_bias"] == 0}
    assert rows["unquantised"]["ppl"] == pytest.approx(plain["unquantised"]["ppl"], rel=0.01)
    assert rows[SYMMETRIC]["dnll"] > 5 * rows[ROTATED]["dnll"] > 0
    assert abs(rows[PER_CHANNEL]["dnll"]) < 3 * rows[PER_CHANNEL]["dnll_se"]


@pytest.mark.slow
def test_on_the_embedded_model_a_key_bias_breaks_symmetric_int4_and_not_per_channel():
    from labkit.experiments.kv_failures import failure_policies
    from labkit.experiments.kv_quality import window_nll
    from labkit.experiments.recorded_quality import embedded_setup

    model, token_ids, _ = embedded_setup("cpu")
    token_ids, policies = token_ids[:256], failure_policies()
    plain = window_nll(model, token_ids, ctx=256)
    with key_bias(model, 40.0):
        exact = window_nll(model, token_ids, ctx=256)
        symmetric, per_channel = (
            window_nll(model, token_ids, policies[name], ctx=256) - exact for name in (SYMMETRIC, PER_CHANNEL)
        )
    assert abs(float((exact - plain).mean())) < 0.02  # softmax ignores the bias
    assert symmetric.mean() > 1.0 and abs(float(per_channel.mean())) < 0.1
