"""Backend `torch` against the obvious reference, and what the plug-in refuses."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, Gemma3nForCausalLM, Gemma3nTextConfig, LlamaForCausalLM

from labkit.engine import LLM
from labkit.engine.attention import ATTENTION_NAME, attach, detach
from labkit.engine.backends import choose_backend, load_backend
from labkit.engine.build import require_windows_to_arrive
from labkit.engine.input_batch import InputBatch, stage_inputs
from labkit.engine.kv_storage import KVStorage, cache_spec, record_layer_shapes
from labkit.engine.torch_attention import TorchPagedAttention
from labkit.kernels import KVPages, reference
from labkit.scheduling import Request, SamplingParams, ScheduledRequest, StepPlan

BLOCK_SIZE = 4


def make_batch(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[InputBatch, int]:
    """A batch of sequences given as (context length, new tokens), over shuffled blocks; and the number of blocks."""
    num_blocks = sum(-(-length // BLOCK_SIZE) for length, _ in lengths) + 3
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    entries = []
    for i, (length, new) in enumerate(lengths):
        table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        request = Request(str(i), list(range(length)), SamplingParams())
        entries.append(ScheduledRequest(request, length - new, new, table, 1))
    return stage_inputs(StepPlan(0, tuple(entries)), BLOCK_SIZE, torch.device("cpu")), num_blocks


def poisoned_pages(num_blocks: int, heads: int, dim_k: int, dim_v: int) -> KVPages:
    return KVPages(
        torch.full((num_blocks, heads, BLOCK_SIZE, dim_k), math.nan),
        torch.full((num_blocks, heads, BLOCK_SIZE, dim_v), math.inf),
    )


def fill_context(lengths: list[tuple[int, int]], pages: KVPages) -> None:
    """Write random K and V for every position of every sequence, as a step with whole prompts would."""
    batch, _ = make_batch([(length, length) for length, _ in lengths])
    k, v = (torch.randn(len(batch.token_ids), tensor.shape[1], tensor.shape[3]) for tensor in pages)
    TorchPagedAttention(batch, BLOCK_SIZE).write(k, v, pages)


MIXES = {
    "decode": [(1, 1), (7, 1), (8, 1), (19, 1)],
    "decode, very different lengths": [(3, 1), (300, 1), (90, 1), (5, 1)],
    "whole prompts": [(5, 5), (12, 12)],
    "chunks": [(20, 7), (9, 2), (11, 11)],
    "mixed": [(9, 1), (6, 6), (30, 1), (17, 5), (1, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("q_heads,kv_heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"softcap": 2.0},
        {"sinks": True},
        {"sliding_window": 3, "softcap": 5.0, "sinks": True},
    ],
    ids=str,
)
def test_torch_backend_agrees_with_the_reference(mix, q_heads, kv_heads, options):
    torch.manual_seed(0)
    batch, num_blocks = make_batch(MIXES[mix])
    pages = poisoned_pages(num_blocks, kv_heads, 8, 6)
    fill_context(MIXES[mix], pages)
    q = torch.randn(len(batch.token_ids), q_heads, 8)
    chosen = {"sliding_window": None, "softcap": None, "sinks": None} | options
    if chosen["sinks"]:
        chosen["sinks"] = torch.randn(q_heads)
    got = TorchPagedAttention(batch, BLOCK_SIZE).attend(q, pages, scale=0.3, **chosen)
    expected = reference.paged_attention(
        q,
        pages,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        scale=0.3,
        max_query_len=batch.max_query_len,
        **chosen,
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_write_puts_each_token_into_its_slot_and_clears_the_rest_of_a_fresh_block():
    batch, num_blocks = make_batch(MIXES["mixed"])
    got, expected = poisoned_pages(num_blocks, 3, 8, 6), poisoned_pages(num_blocks, 3, 8, 6)
    k, v = torch.randn(len(batch.token_ids), 3, 8), torch.randn(len(batch.token_ids), 3, 6)
    TorchPagedAttention(batch, BLOCK_SIZE).write(k, v, got)
    fresh = [slot // BLOCK_SIZE for slot in batch.slot_mapping.tolist() if slot % BLOCK_SIZE == 0]
    for tensor in expected:
        tensor[fresh] = 0
    reference.write_kv(k, v, expected, batch.slot_mapping)
    torch.testing.assert_close(got.k, expected.k, equal_nan=True)
    torch.testing.assert_close(got.v, expected.v, equal_nan=True)


def test_staging_lays_out_tokens_positions_and_slots():
    table = [5, 2, 9]
    request = Request("a", list(range(100, 111)), SamplingParams())
    decoding = Request("b", [7, 8, 9], SamplingParams())
    plan = StepPlan(0, (ScheduledRequest(request, 6, 5, table, 1), ScheduledRequest(decoding, 2, 1, [3], 1)))
    batch = stage_inputs(plan, BLOCK_SIZE, torch.device("cpu"))
    assert batch.token_ids.tolist() == [106, 107, 108, 109, 110, 9]
    assert batch.positions.tolist() == [6, 7, 8, 9, 10, 2]
    assert batch.slot_mapping.tolist() == [10, 11, 36, 37, 38, 14]
    assert batch.query_start_loc.tolist() == [0, 5, 6] and batch.seq_lens.tolist() == [11, 3]
    assert batch.block_table.tolist() == [[5, 2, 9], [3, 0, 0]]


def test_copies_read_every_source_before_they_write(tiny_llama):
    attach(tiny_llama)
    storage = KVStorage(record_layer_shapes(tiny_llama), 4, BLOCK_SIZE, "cpu")
    detach(tiny_llama)
    for tensor in storage.tensors():
        tensor.copy_(torch.arange(4.0)[:, None, None, None].expand_as(tensor))
    storage.copy_blocks([(0, 1), (1, 2)])
    for tensor in storage.tensors():
        assert tensor[:, 0, 0, 0].tolist() == [0, 0, 1, 3]


def test_shapes_come_from_what_attention_receives(tiny_llama: LlamaForCausalLM):
    attach(tiny_llama)
    shapes = record_layer_shapes(tiny_llama)
    detach(tiny_llama)
    config = tiny_llama.config
    assert list(shapes) == list(range(config.num_hidden_layers))
    assert all((s.num_kv_heads, s.head_dim_k, s.head_dim_v) == (2, 16, 16) for s in shapes.values())
    assert cache_spec(shapes, 16).bytes_per_block == 16 * config.num_hidden_layers * 2 * (16 + 16) * 4
    assert config._attn_implementation != ATTENTION_NAME


def test_layers_that_share_kv_own_no_pages():
    config = Gemma3nTextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    model = Gemma3nForCausalLM(config).eval()
    attach(model)
    shapes = record_layer_shapes(model)
    assert [s.source for s in shapes.values()] == [0, 1, 0, 1]
    assert [s.sliding_window for s in shapes.values()] == [8, None, 8, None]
    storage = KVStorage(shapes, 2, BLOCK_SIZE, "cpu")
    assert len(list(storage.tensors())) == 4
    assert storage.pages(2) is storage.pages(0)


def test_a_model_whose_attention_cannot_be_replaced_is_refused():
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=r"BloomForCausalLM.*attention"):
        attach(BloomForCausalLM(config))


def test_a_window_that_never_reaches_attention_is_refused(tiny_llama):
    attach(tiny_llama)
    shapes = record_layer_shapes(tiny_llama)
    detach(tiny_llama)
    require_windows_to_arrive(tiny_llama, shapes)
    tiny_llama.config.sliding_window = 8  # llama layers know nothing of it
    try:
        with pytest.raises(ValueError, match=r"LlamaForCausalLM.*sliding window of layers \[0, 1, 2\]"):
            require_windows_to_arrive(tiny_llama, shapes)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM.*not supported.*sliding window"):
            LLM(tiny_llama)
    finally:
        del tiny_llama.config.sliding_window


def test_calling_an_attached_model_outside_the_engine_says_what_to_do(tiny_llama):
    attach(tiny_llama)
    try:
        with pytest.raises(RuntimeError, match=r"llm\.close\(\)"):
            tiny_llama(torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    finally:
        detach(tiny_llama)
    assert tiny_llama(torch.zeros(1, 2, dtype=torch.int64)).logits.shape == (1, 2, 128)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        load_backend("triton", torch.device("cpu"))
    name, reason = choose_backend("cpu")
    assert name == "torch" and "PyTorch" in reason
    assert load_backend("auto", torch.device("cpu"))[0] == "torch"
