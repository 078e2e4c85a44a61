"""The articles' code in corrected form, and what was wrong with it."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from labkit.kv_math import kv_bytes_per_token, model_shape
from labkit.memory import KVCacheManager
from labkit.quant import KVFormat, dequantise, quantise


def grouped_query_attention(q, k, v):
    """q [batch, query, heads, d], k and v [batch, keys, kv_heads, d], causal: query i is the i-th last key."""
    batch, num_queries, num_heads, d = q.shape
    num_keys, kv_heads = k.shape[1:3]
    grouped = q.view(batch, num_queries, kv_heads, num_heads // kv_heads, d)
    scores = torch.einsum("bqgrd,bkgd->bgrqk", grouped, k) / d**0.5
    age = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None]
    weights = scores.masked_fill(age < 0, float("-inf")).softmax(-1)
    return torch.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(q.shape)


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(64, 8), (40, 8), (40, 5), (9, 3), (8, 1), (4, 4)])
def test_grouped_query_attention(num_heads, kv_heads):
    """B26 to B28: names, head mapping, softmax, scale and mask."""
    torch.manual_seed(0)
    q = torch.randn(2, 7, num_heads, 16)
    k, v = torch.randn(2, 2, 7, kv_heads, 16)
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(grouped_query_attention(q, k, v), expected, atol=1e-5, rtol=1e-5)


def test_the_articles_head_mapping_interleaves():
    """B27: it pairs query head i with KV head i mod 8; models pair it with i // group."""
    article = torch.arange(64).view(8, 8)  # [n_heads // group_size, group_size]: K's head axis is the second
    assert torch.equal(article % 8, torch.arange(8).expand(8, 8))
    assert not torch.equal(article // 8, article % 8)


def test_quantised_rows_are_small_and_rows_of_zeros_come_back():
    """B36: codes are int8, and a row without a largest value gives no NaN."""
    x = torch.randn(64, 1, 128, dtype=torch.bfloat16)
    x[3] = 0
    small = quantise(x, KVFormat.of("int8"))
    assert small.codes.dtype == torch.int8
    assert small.num_bytes == 64 * (128 + 4) < x.nbytes
    back = dequantise(small)
    assert back.isfinite().all()
    assert (back[3] == 0).all()
    as_written = (x * (127.0 / x.abs().amax(-1, keepdim=True))).round().clamp(-128, 127)
    assert as_written.nbytes == x.nbytes  # no byte saved
    assert as_written[3].isnan().all()


def test_a_product_of_quantised_rows_divides_by_both_scales():
    """B37: steps multiply a row's codes and a column's, so one of them is transposed; inverse steps divide."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 128), torch.randn(96, 1, 128)
    qx, qy = quantise(x, KVFormat.of("int8")), quantise(y, KVFormat.of("int8"))
    assert qx.scales is not None and qy.scales is not None
    steps = qx.scales.view(64, 1) * qy.scales.view(1, 96)
    product = (qx.codes[:, 0].float() @ qy.codes[:, 0].float().T) * steps
    exact = x[:, 0] @ y[:, 0].T
    assert (product - exact).norm() / exact.norm() < 0.02
    inverse = (1 / qx.scales).view(64, 1) * (1 / qy.scales).view(1, 96)
    as_written = (qx.codes[:, 0].float() @ qy.codes[:, 0].float().T) * inverse
    assert as_written.abs().mean() / exact.abs().mean() > 1e5


def test_a_block_table_allocates_appends_and_frees():
    """A18, B16 and B17: blocks come from one pool, and the table has a row for each sequence."""
    kv = KVCacheManager(num_blocks=8, block_size=16, enable_prefix_caching=False)
    assert kv.admit("A", 20) and kv.admit("B", 40)
    assert kv.extend("A", 32, 1) == []  # position 32 is the first of a third block
    assert [len(kv.block_table(name)) for name in "AB"] == [3, 3]
    assert not set(kv.block_table("A")) & set(kv.block_table("B"))
    kv.free("A")
    kv.free("B")
    assert kv.num_free_blocks == 8
    kv.check()


def test_kv_bytes_grow_by_the_same_step_with_every_token():
    """B8 to B10: linear in length and in the batch, never exponential."""
    spec = model_shape("llama-2-7b").kv_spec("float16", block_size=1)
    sizes = [spec.bytes_for_request(n) for n in range(1, 100)]
    assert {after - before for before, after in pairwise(sizes)} == {524_288}
    assert spec.bytes_for_batch([4096] * 8) == 8 * spec.bytes_for_request(4096)


def test_the_formula_needs_kv_heads():
    """A10 and B4: with query heads SmolLM2's cache comes out three times too big."""
    assert kv_bytes_per_token(30, 9, 64) == 3 * kv_bytes_per_token(30, 3, 64) == 3 * 23_040


def test_memory_of_views_is_counted_once():
    """B48: the article's loop over objects lists one 4 MiB storage four times."""
    from labkit.engine.memory_monitor import unique_storage_bytes

    base = torch.empty(1 << 20)
    views = [base, base[: 1 << 19], base.view(1024, 1024), base[:1].expand(4)]
    assert unique_storage_bytes(views) == 4 << 20
    assert sum(t.element_size() * t.nelement() for t in views) > 8 << 20
