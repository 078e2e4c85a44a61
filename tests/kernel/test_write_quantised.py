"""write_quantised_kv stores the codes and scales of labkit.quant, bit for bit, however the tokens come."""

from __future__ import annotations

import pytest
import torch

from labkit.kv_math import KVFormat, ScaleLayout
from labkit.quant import Quantised, quantise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scaled(dtype, tokens=1, **layout):
    return KVFormat(dtype, ScaleLayout(tokens=tokens, **layout))


HALF = dict(scale_bits=16, zero_point_bits=16)
FORMATS = {
    "float16": KVFormat("float16"),
    "int8": scaled("int8"),
    "int8 asymmetric": scaled("int8", zero_point_bits=32),
    "int8 groups": scaled("int8", channels=16, scale_bits=16),
    "int8 per channel": scaled("int8", "block", channels=1),
    "int8 per block": scaled("int8", "block"),
    "fp8": scaled("fp8_e4m3"),
    "fp8 unscaled": KVFormat("fp8_e4m3"),
    "fp8_e5m2": scaled("fp8_e5m2"),
    "int4": scaled("int4", **HALF),
    "int4 symmetric": scaled("int4", scale_bits=16),
    "int4 groups": scaled("int4", channels=16, **HALF),
    "int4 per channel": scaled("int4", "block", channels=1, **HALF),
    "int4 per channel symmetric": scaled("int4", "block", channels=1),
}
FIXED = {
    "fp8 per layer": scaled("fp8_e4m3", "layer", heads="all"),
    "fp8_e5m2 per head": scaled("fp8_e5m2", "layer"),
    "int8 asymmetric per head": scaled("int8", "layer", **HALF),
}


class Cache:
    """Pages of two formats and tails, all of them poison until written."""

    def __init__(self, key, value, num_blocks, block_size, num_heads, head_dim, dtype=torch.float16):
        from labkit.engine.quantised_pages import allocate_pages
        from labkit.kernels import QuantisedKVPages

        def side(format):
            pages = allocate_pages(format, num_blocks, num_heads, block_size, head_dim, DEVICE)
            if format.scales is None or format.scales.tokens != "layer":
                for tensor in pages:
                    if tensor is not None:
                        tensor.view(torch.uint8).fill_(255)
            tail = (num_heads, block_size, head_dim)
            return pages, torch.full((4, *tail), torch.nan, device=DEVICE, dtype=dtype) if format.needs_tail else None

        (k, k_tail), (v, v_tail) = side(key), side(value)
        self.kv = QuantisedKVPages(k, v, head_dim, head_dim, k_tail, v_tail)

    def write(self, k, v, slots, seq_lens, query_lens, tail_rows=None):
        from labkit.kernels import write_quantised_kv

        def int32(values):
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        starts = int32([0, *query_lens]).cumsum(0).to(torch.int32)
        rows = None if tail_rows is None else int32(tail_rows)
        write_quantised_kv(
            k, v, self.kv, slots.to(DEVICE), seq_lens=int32(seq_lens), query_start_loc=starts, tail_rows=rows
        )


def assert_blocks(pages, blocks, expected: Quantised):
    """`blocks` of `pages` hold what was quantised, one block after the other."""
    for got, want in zip(pages, (expected.codes, expected.scales, expected.zero_points), strict=True):
        if want is not None:
            want = want.unflatten(0, (len(blocks), -1)).transpose(1, 2)
            if want.dtype.itemsize == 1:  # float8 has no == and no indexing everywhere
                got, want = got.view(torch.uint8), want.contiguous().view(torch.uint8)
            assert torch.equal(got[blocks], want)  # equal numbers: a zero point of 0 may have either sign


def hard_rows(num_tokens, num_heads, head_dim, dtype=torch.float16):
    """Random rows of very different sizes, among them zeros, constants and rows of one sign."""
    gen = torch.Generator().manual_seed(num_tokens + head_dim)
    x = torch.randn(num_tokens, num_heads, head_dim, generator=gen) * torch.logspace(-5, 3, num_tokens)[:, None, None]
    x[0], x[1], x[2] = 0.0, 3.0, x[2].abs() + 50
    x[3, 0, : head_dim // 2] = -0.0
    return x.to(DEVICE, dtype)


SIZES = [  # heads, head size, block size
    *((name, 3, 64, 4, torch.float32) for name in FORMATS),
    *(
        (*case, torch.float16)
        for case in (
            ("int8", 5, 96, 16), ("int8", 1, 256, 16), ("int4", 5, 80, 16), ("fp8", 3, 128, 16),
            ("int8 per channel", 3, 96, 4), ("int8 per channel", 5, 192, 48), ("int4 per channel", 3, 80, 4),
            ("int4 per channel", 5, 128, 16), ("int4 per channel", 2, 128, 32), ("int4 per channel", 1, 256, 64),
            ("int4 per channel", 1, 64, 256), ("int4 per channel", 3, 192, 48),
        )
    ),
]  # fmt: skip


def at_an_odd_place(tensor):
    """The same numbers, behind one more in memory: two of them are no aligned word."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("odd", ["new", "tail"])
def test_rows_at_odd_places_are_not_read_as_words(odd):
    from labkit.kernels.quantise import code_format

    format, block_size = FORMATS["int4 per channel"], 16
    cache = Cache(format, format, 1, block_size, 2, 64)
    k, v = hard_rows(block_size, 2, 128).split(64, 2)
    assert code_format(k, cache.kv.k, cache.kv.k_tail).channels == 2
    if odd == "new":
        k = at_an_odd_place(k)
    else:
        cache.kv = cache.kv._replace(k_tail=at_an_odd_place(cache.kv.k_tail))
    assert code_format(k, cache.kv.k, cache.kv.k_tail).channels == 1
    for first, last in ((0, 10), (10, block_size)):
        cache.write(k[first:last], v[first:last], torch.arange(first, last), [last], [last - first], [0])
    assert_blocks(cache.kv.k, [0], quantise(k, format))


@pytest.mark.parametrize("name, num_heads, head_dim, block_size, dtype", SIZES)
def test_codes_and_scales_are_those_of_the_quantiser(name, num_heads, head_dim, block_size, dtype):
    num_tokens = 2 * block_size
    k, v = hard_rows(num_tokens, num_heads, 2 * head_dim, dtype).split(head_dim, 2)  # views of a merged projection
    cache = Cache(FORMATS[name], FORMATS["int8"], 5, block_size, num_heads, head_dim, dtype)
    blocks = torch.tensor([3, 1])
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
    cache.write(k, v, slots, [num_tokens], [num_tokens], [2])
    assert_blocks(cache.kv.k, blocks, quantise(k, FORMATS[name], block_size=block_size))
    assert_blocks(cache.kv.v, blocks, quantise(v, FORMATS["int8"]))
    untouched = cache.kv.k.codes.view(torch.uint8)[[0, 2, 4]]
    assert (untouched == 255).all()


@pytest.mark.parametrize("name", FIXED)
def test_scales_that_are_fixed_before_the_run_are_read_and_saturate(name):
    from labkit.engine.quantised_pages import set_fixed_scales
    from labkit.quant import measure_scales

    format = FIXED[name]
    scales = measure_scales(hard_rows(8, 3, 64) * 0.2, format)
    cache = Cache(FORMATS["int4 per channel"], format, 3, 8, 3, 64)
    set_fixed_scales(cache.kv.v, format, scales)
    x = hard_rows(8, 3, 64)
    cache.write(x, x, 16 + torch.arange(8), [8], [8], [0])
    want = quantise(x, format, scales=scales)
    assert torch.equal(cache.kv.v.codes[2].view(torch.uint8), want.codes.transpose(0, 1).view(torch.uint8))
    assert cache.kv.v.scales is not None and torch.equal(cache.kv.v.scales[:, :, 0], scales.scales)


def rare_rows(num_tokens, head_dim, dtype):
    """Channels (and tokens) of every magnitude, among them subnormal scales, one value only, zeros of either sign."""
    gen = torch.Generator().manual_seed(1)
    tokens, channels = torch.arange(num_tokens)[:, None], torch.arange(head_dim)[None]
    x = torch.randn(num_tokens, 2, head_dim, generator=gen)
    x[:, 0] *= 2.0 ** (channels % 36 - 24)  # per channel: from where scales are 0 in float16
    x[:, 1] *= 2.0 ** (tokens % 36 - 24)  # per token
    x[:, :, 0], x[:, :, 1], x[:, :, 2] = 0.0, -0.0, 0.1
    x[:, :, 3] = -1000 + tokens % 2 * 2.0**-20
    x[:, 0, 4] = tokens[:, 0] * 1.5 - 3  # halves of a scale
    if dtype != torch.float16:
        x[:, 0, 5], x[:, 0, 6], x[:, 0, 7] = 3e38, -3e38, 1e5 * (tokens[:, 0] - 3)
        x[0, 1, 8], x[1, 1, 8] = 3e38, -3e38
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["int4 per channel", "int4"])
@pytest.mark.parametrize("block_size, head_dim", [(32, 128), (48, 80)])
def test_rare_values_in_int4(name, dtype, block_size, head_dim):
    x = rare_rows(block_size, head_dim, dtype)
    cache = Cache(FORMATS[name], FORMATS["int4"], 3, block_size, 2, head_dim, dtype)
    cache.write(x, x, 2 * block_size + torch.arange(block_size), [block_size], [block_size], [1])
    for pages, format in ((cache.kv.k, FORMATS[name]), (cache.kv.v, FORMATS["int4"])):
        assert_blocks(pages, torch.tensor([2]), quantise(x, format, block_size=block_size))


CHUNKS = [[14], [1] * 9, [6, 8], [3, 1, 9]]


@pytest.mark.parametrize(
    "name, chunks", [*(("int4 per channel", chunks) for chunks in CHUNKS), ("int8 per block", [4, 1, 8])], ids=str
)
def test_a_block_is_quantised_when_it_is_full_however_its_tokens_come(name, chunks):
    """Two sequences and two padded rows, in blocks of 4; what is not full yet is in the tails as it came."""
    format, num_tokens = FORMATS[name], sum(chunks)
    k, v = torch.randn(2, 2, num_tokens, 2, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    cache = Cache(format, format, 10, 4, 2, 64)
    tables, rows, full = torch.tensor([[7, 2, 9, 0], [1, 3, 4, 5]]), [2, 0], num_tokens // 4
    padding = torch.full((2, 2, 64), torch.nan, device=DEVICE, dtype=torch.float16)
    done = 0
    for count in chunks:
        pos = torch.arange(done, done + count)
        slots = torch.cat([*(tables[:, pos // 4] * 4 + pos % 4), torch.tensor([-1, -1])])
        done += count
        new = [torch.cat([x[0, pos], x[1, pos], padding]) for x in (k, v)]
        cache.write(*new, slots, [done, done, 0, 1], [count, count, 1, 1], [*rows, 3, 3])
    for x, pages, tail in ((k, cache.kv.k, cache.kv.k_tail), (v, cache.kv.v, cache.kv.v_tail)):
        for seq in range(2):
            assert_blocks(pages, tables[seq, :full], quantise(x[seq, : full * 4], format, block_size=4))
            waiting = x[seq, full * 4 :].transpose(0, 1)
            assert tail is not None
            assert torch.equal(tail[rows[seq], :, : waiting.shape[1]], waiting)
        assert tail is not None and tail[[1, 3]].isnan().all()
        unused = [6, 8, *tables[:, full:].flatten().tolist()]
        assert (pages.codes.view(torch.uint8)[unused] == 255).all()


def test_bad_input_is_named():
    from labkit.kernels import write_quantised_kv

    x, slots = torch.zeros(2, 3, 64, dtype=torch.float16), torch.zeros(2, dtype=torch.int64)
    meta = dict(seq_lens=torch.tensor([2]), query_start_loc=torch.tensor([0, 2]), tail_rows=None)
    tails = Cache(FORMATS["int4 per channel"], FORMATS["int8"], 3, 8, 3, 64).kv
    with pytest.raises(ValueError, match="tail_rows must be"):
        write_quantised_kv(x, x, tails, slots, **meta)
    kv = Cache(FORMATS["int8"], FORMATS["int4"], 3, 8, 3, 64).kv
    with pytest.raises(ValueError, match=r"k_new must be \[num_tokens, 3, 64\]"):
        write_quantised_kv(x[:, :2], x, kv, slots, **meta)
    with pytest.raises(TypeError, match="slot_mapping must be int64"):
        write_quantised_kv(x, x, kv, slots.int(), **meta)
    with pytest.raises(ValueError, match="query_start_loc"):
        write_quantised_kv(x, x, kv, slots, **{**meta, "query_start_loc": slots[:1]})
    assert kv.k.scales is not None
    shared = kv.k._replace(scales=kv.k.scales[:, :1])
    with pytest.raises(ValueError, match="several heads share"):
        write_quantised_kv(x, x, kv._replace(k=shared), slots, **meta)
    with pytest.raises(ValueError, match="need a tail"):
        write_quantised_kv(x, x, tails._replace(k_tail=None), slots, **meta)
    with pytest.raises(TypeError, match="k_new must have the dtype of its tail"):
        write_quantised_kv(x.float(), x, tails, slots, **meta)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_long_prefill_bit_for_bit_on_a_gpu(name, dtype):
    x = hard_rows(2048, 8, 128, dtype)
    cache = Cache(FORMATS[name], FORMATS["int8"], 128, 16, 8, 128, dtype)
    blocks = torch.randperm(128)
    slots = (blocks[:, None] * 16 + torch.arange(16)).flatten()
    cache.write(x, x, slots, [2048], [2048], [0])
    assert_blocks(cache.kv.k, blocks, quantise(x, FORMATS[name], block_size=16))
    assert_blocks(cache.kv.v, blocks, quantise(x, FORMATS["int8"]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", SIZES[len(FORMATS) :], ids=str)
def test_other_sizes_bit_for_bit_on_a_gpu(case):
    test_codes_and_scales_are_those_of_the_quantiser(*case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIXED)
def test_fixed_scales_on_a_gpu(name):
    test_scales_that_are_fixed_before_the_run_are_read_and_saturate(name)


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_tails_on_a_gpu(chunks):
    test_a_block_is_quantised_when_it_is_full_however_its_tokens_come("int4 per channel", chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["int4 per channel", "int4"])
@pytest.mark.parametrize("block_size, head_dim", [(32, 128), (48, 80)])
def test_rare_values_in_int4_on_a_gpu(name, dtype, block_size, head_dim):
    test_rare_values_in_int4(name, dtype, block_size, head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_random_bits_in_int4_on_a_gpu(dtype, seed):
    """Any finite numbers there are, of very different magnitudes in one channel."""
    gen = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (4096, 8, 128), generator=gen).to(torch.int16)
    x = bits.view(dtype).nan_to_num(nan=1.0, posinf=2.0, neginf=-0.5).to(DEVICE)
    cache = Cache(FORMATS["int4 per channel"], FORMATS["int4"], 128, 32, 8, 128, dtype)
    cache.write(x, x, torch.arange(4096), [4096], [4096], [0])
    for pages, name in ((cache.kv.k, "int4 per channel"), (cache.kv.v, "int4")):
        assert_blocks(pages, torch.arange(128), quantise(x, FORMATS[name], block_size=32))
