"""Quantised pages on the `torch` backend: the codes of the reference quantiser, however the tokens come."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from labkit.engine.input_batch import InputBatch, stage_inputs
from labkit.engine.kv_storage import KVStorage, LayerShape, cache_spec
from labkit.engine.quantised_pages import allocate_pages, format_of
from labkit.engine.tail_rows import TailRows
from labkit.engine.torch_attention import TorchPagedAttention
from labkit.engine.torch_quantised import QuantisedReader
from labkit.kernels import KVPages, QuantisedKVPages, reference
from labkit.kv_math import PER_HEAD, PER_TENSOR, PER_TOKEN_HEAD, KVFormat, ScaleLayout
from labkit.quant import KVPolicy, LayerScales, dequantise, measure_scales, quantise
from labkit.scheduling import Request, SamplingParams, ScheduledRequest, StepPlan

BLOCK_SIZE, HEADS, DIM_K, DIM_V, NUM_BLOCKS = 4, 2, 8, 6, 24
TABLES = [[5, 2, 9, 0, 7, 11], [3, 20, 4, 8], [1, 13, 6]]
FORMATS = {
    "int8": KVFormat.of("int8"),
    "int8 asymmetric": KVFormat("int8", ScaleLayout(1, 1, "all", 16, 32)),
    "int4": KVFormat.of("int4"),
    "int4 symmetric": KVFormat("int4", PER_TOKEN_HEAD),
    "int4 in groups": KVFormat("int4", ScaleLayout(1, 1, 2, 16, 16)),
    "int4 per channel": KVFormat("int4", ScaleLayout("block", 1, 1, 16, 16)),
    "int8 per channel": KVFormat("int8", ScaleLayout("block", 1, 1)),
    "int8 per block": KVFormat("int8", ScaleLayout("block", 1)),
    "fp8": KVFormat.of("fp8"),
    "fp8 unscaled": KVFormat("fp8_e5m2"),
    "fp8 per token": KVFormat("fp8_e4m3", PER_TOKEN_HEAD),
    "bfloat16": KVFormat("bfloat16"),
}
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def storage_of(policy: KVPolicy, dtype: torch.dtype = torch.float32, **options) -> KVStorage:
    """One layer, with poison in every slot, scale and tail that is not written."""
    shapes = {0: LayerShape(4, HEADS, DIM_K, DIM_V, dtype, None, 0)}
    storage = KVStorage(shapes, NUM_BLOCKS, BLOCK_SIZE, "cpu", policy, num_tails=8, **options)
    for tensor in [*storage.tensors(), *storage.tails]:
        tensor.fill_(math.nan if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else -128)
    return storage


def batch_of(spans: list[tuple[int, int]]) -> InputBatch:
    """Sequence i computes positions first ... last - 1."""
    entries = [
        ScheduledRequest(Request(str(i), list(range(last)), SamplingParams()), first, last - first, TABLES[i], 1)
        for i, (first, last) in enumerate(spans)
    ]
    return stage_inputs(StepPlan(0, tuple(entries)), BLOCK_SIZE, torch.device("cpu"), tail_rows=[6, 0, 3][: len(spans)])


def write_in_steps(storage: KVStorage, k: list, v: list, steps: list[list[tuple[int, int]]]) -> InputBatch:
    """Write sequences step by step; k[i] and v[i] are [num_tokens, HEADS, D]. Returns the last step's batch."""
    pages = storage.pages(0)
    for spans in steps:
        batch = batch_of(spans)
        new = [torch.cat([x[i][first:last] for i, (first, last) in enumerate(spans)]) for x in (k, v)]
        TorchPagedAttention(batch, BLOCK_SIZE).write(*new, pages)
    return batch


LENGTHS = [21, 13, 8]
STEPS = {
    "at once": [[(0, 21), (0, 13), (0, 8)]],
    "in chunks": [[(0, 6), (0, 1), (0, 4)], [(6, 7), (1, 12), (4, 5)], [(7, 20), (12, 13), (5, 8)], [(20, 21)]],
    "one by one": [[(p, p + 1) for n in LENGTHS if p < n] for p in range(21)],
}


@formats
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_pages_hold_the_codes_of_the_quantiser_and_tails_what_is_unfinished(format, steps):
    torch.manual_seed(0)
    k, v = ([torch.randn(n, HEADS, d) for n in LENGTHS] for d in (DIM_K, DIM_V))
    storage = storage_of(KVPolicy(format, format))
    pages = storage.pages(0)
    assert isinstance(pages, QuantisedKVPages)
    write_in_steps(storage, k, v, steps)
    table = torch.tensor([t + t[:1] * (6 - len(t)) for t in TABLES])
    got = QuantisedReader(table, LENGTHS, torch.tensor([6, 0, 3]), BLOCK_SIZE).read(pages, torch.float32)
    fixed = measure_fixed(format)
    for side, values in zip(got, (k, v), strict=True):
        for i, n in enumerate(LENGTHS):
            full = n // BLOCK_SIZE * BLOCK_SIZE if format.needs_tail else n
            stored = dequantise(quantise(values[i][:full], format, block_size=BLOCK_SIZE, scales=fixed))
            read = side[i].transpose(0, 1)
            assert torch.equal(read[:full], stored)
            assert torch.equal(read[full:n], values[i][full:])
            assert torch.equal(read[n:], torch.zeros_like(read[n:])), "nothing is behind the end"


def measure_fixed(format: KVFormat):
    """Scales 1.0 where they are fixed before the run."""
    if format.scales is None or format.scales.tokens != "layer":
        return None
    scales = measure_scales(torch.zeros(1, HEADS, DIM_K), format)
    return replace(scales, scales=torch.ones_like(scales.scales))


@formats
def test_attention_reads_what_was_stored(format):
    torch.manual_seed(1)
    k, v = ([torch.randn(n, HEADS, d) for n in LENGTHS] for d in (DIM_K, DIM_V))
    storage = storage_of(KVPolicy(format, format))
    batch = write_in_steps(storage, k, v, [[(0, 20), (0, 9), (0, 7)], [(20, 21), (9, 13), (7, 8)]])
    pages = storage.pages(0)
    q = torch.randn(6, 4, DIM_K)
    options = dict(scale=0.3, sliding_window=9, softcap=None, sinks=None)
    got = TorchPagedAttention(batch, BLOCK_SIZE).attend(q, pages, **options)

    plain = KVPages(
        torch.zeros(NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM_K), torch.zeros(NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM_V)
    )
    fixed = measure_fixed(format)
    for i, n in enumerate(LENGTHS):
        full = n // BLOCK_SIZE * BLOCK_SIZE if format.needs_tail else n
        for side, values in ((plain.k, k[i]), (plain.v, v[i])):
            stored = dequantise(quantise(values[:full], format, block_size=BLOCK_SIZE, scales=fixed))
            for p, row in enumerate(torch.cat([stored, values[full:]])):
                side[TABLES[i][p // BLOCK_SIZE], :, p % BLOCK_SIZE] = row
    expected = reference.paged_attention(
        q, plain, batch.block_table, batch.seq_lens, batch.query_start_loc, max_query_len=4, **options
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@formats
def test_bytes_allocated_are_those_of_the_formula(format):
    policy = KVPolicy(format, FORMATS["int8"], exceptions=((0, format, format),))
    storage = storage_of(policy, torch.float16)
    assert storage.num_bytes == storage.spec.bytes_for_pool(NUM_BLOCKS)
    assert sum(tensor.nbytes for tensor in storage.tensors()) == NUM_BLOCKS * storage.spec.bytes_per_block
    assert sum(tail.nbytes for tail in storage.tails) == storage.spec.bytes_for_tails(8)


@formats
def test_pages_tell_their_format(format):
    pages = allocate_pages(format, NUM_BLOCKS, HEADS, BLOCK_SIZE, DIM_K, "meta")
    found = format_of(pages, DIM_K, format.needs_tail)
    x = torch.randn(2 * BLOCK_SIZE, HEADS, DIM_K)
    one, other = quantise(x, format, block_size=BLOCK_SIZE), quantise(x, found, block_size=BLOCK_SIZE)
    assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    assert (one.scales is None) == (other.scales is None)
    if one.scales is not None and other.scales is not None:
        assert (one.scales.dtype, one.scales.shape) == (other.scales.dtype, other.scales.shape)


@formats
def test_blocks_are_copied_with_their_scales(format):
    torch.manual_seed(2)
    k, v = (torch.randn(8, HEADS, d) for d in (DIM_K, DIM_V))
    storage = storage_of(KVPolicy(format, format))
    write_in_steps(storage, [k], [v], [[(0, 8)]])
    storage.copy_blocks([(TABLES[0][0], 17), (TABLES[0][1], 18)])
    tables = [torch.tensor([blocks]) for blocks in (TABLES[0][:2], [17, 18])]
    one, other = (
        QuantisedReader(table, [8], torch.tensor([0]), BLOCK_SIZE).read(storage.pages(0), torch.float32)
        for table in tables
    )
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_a_request_keeps_its_tail_row_until_it_is_taken_back():
    rows = TailRows(2)
    assert (rows.of("a"), rows.of("b"), rows.of("a"), len(rows)) == (0, 1, 0, 2)
    rows.release(["a", "never ran"])
    assert (rows.of("c"), rows.of("b"), len(rows)) == (0, 1, 2)


def test_16_bit_layers_keep_plain_pages():
    shapes = {i: LayerShape(4, HEADS, DIM_K, DIM_V, torch.bfloat16, None, i) for i in range(3)}
    policy = KVPolicy.of("int8").with_layers([0, -1], "bfloat16").with_layers([1], "bfloat16", "int8")
    storage = KVStorage(shapes, 4, BLOCK_SIZE, "cpu", policy)
    assert [type(storage.pages(i)) for i in range(3)] == [KVPages, QuantisedKVPages, KVPages]


@pytest.mark.parametrize("layout", [PER_TENSOR, PER_HEAD])
def test_scales_that_are_fixed_before_the_run_are_used(layout):
    torch.manual_seed(3)
    format = KVFormat("int8", layout)
    policy = KVPolicy(format, format)
    k, v = (torch.randn(9, HEADS, d) for d in (DIM_K, DIM_V))
    scales = LayerScales(measure_scales(k, format), measure_scales(v, format))
    storage = storage_of(policy, fixed_scales={0: scales})
    write_in_steps(storage, [k], [v], [[(0, 9)]])
    reader = QuantisedReader(torch.tensor([TABLES[0][:3]]), [9], None, BLOCK_SIZE)
    read, _ = reader.read(storage.pages(0), torch.float32)  # type: ignore[arg-type]
    assert torch.equal(read[0, :, :9].transpose(0, 1), dequantise(quantise(k, format, scales=scales.key)))
    with pytest.raises(ValueError, match="measured before the run: pass kv_scales"):
        storage_of(policy)
    with pytest.raises(ValueError, match="kv_scales must have 1 layers, got 2"):
        storage_of(policy, fixed_scales={0: scales, 1: scales})


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (KVFormat("int8", ScaleLayout(2)), "1 token, a block of 4 or the layer, got 2"),
        (KVFormat("int8", ScaleLayout(1, "all")), "for one head, or fixed before the run"),
        (KVFormat("int8", ScaleLayout(1, 1, 5)), "divide the head size 8, got 5"),
    ],
)
def test_formats_that_pages_cannot_hold_are_refused(format, message):
    shapes = {0: LayerShape(4, HEADS, DIM_K, DIM_V, torch.float32, None, 0)}
    with pytest.raises(ValueError, match=message):
        cache_spec(shapes, BLOCK_SIZE, KVPolicy.of(format))
    with pytest.raises(ValueError, match="even head size to store two channels a byte, got 5"):
        allocate_pages(KVFormat.of("int4"), 1, 1, BLOCK_SIZE, 5, "meta")
