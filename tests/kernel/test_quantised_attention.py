"""Attention over quantised pages against float64 attention over what labkit.quant dequantises, poison included."""

from __future__ import annotations

import pytest
import torch

from labkit.quant import KVFormat, KVPolicy, ScaleLayout, dequantise, quantise

INT4 = KVPolicy.of("int4")
PER_TOKEN_FP16 = ScaleLayout(tokens=1, heads=1, scale_bits=16, zero_point_bits=16)
FORMATS = {
    "16 bit": None,
    "fp8": KVFormat.of("fp8"),
    "fp8 without scales": KVFormat("fp8_e4m3"),
    "fp8 a head": KVFormat("fp8_e4m3", ScaleLayout(tokens="layer", heads=1)),
    "fp8_e5m2 a token": KVFormat("fp8_e5m2", ScaleLayout(tokens=1, heads=1)),
    "int8": KVFormat.of("int8"),
    "int8 asymmetric": KVFormat("int8", PER_TOKEN_FP16),
    "int8 a block": KVFormat("int8", ScaleLayout(tokens="block", heads=1)),
    "int8 fixed channels": KVFormat("int8", ScaleLayout(tokens="layer", heads=1, channels=1, zero_point_bits=32)),
    "int8 all heads": KVFormat("int8", ScaleLayout(tokens=1, heads="all")),
    "int4 a channel": INT4.key,
    "int4 a token": INT4.value,
    "int4 symmetric": KVFormat("int4", ScaleLayout(tokens=1, heads=1)),
    "int4 groups": KVFormat("int4", ScaleLayout(tokens=1, heads=1, channels=16, scale_bits=16, zero_point_bits=16)),
}
PAIRS = [
    ("fp8", "fp8"), ("fp8 without scales", "fp8_e5m2 a token"), ("fp8 a head", "fp8 a head"), ("int8", "int8"),
    ("int8 asymmetric", "int8 asymmetric"), ("int8 a block", "int8"), ("int8 fixed channels", "int8 fixed channels"),
    ("int8 all heads", "int4 symmetric"), ("int4 a channel", "int4 a token"), ("int4 symmetric", "int8"),
    ("16 bit", "16 bit"), ("int4 groups", "int4 groups"), ("int4 a channel", "16 bit"), ("16 bit", "int8 asymmetric"),
]  # fmt: skip


class Quantised:
    """A paged batch (conftest.py) in other formats: kv and tail_rows for the kernel, `read` as what they stand for."""

    def __init__(self, batch, k_format, v_format):
        from labkit.kernels import KVPages
        from labkit.kernels.pages import QuantisedKVPages

        self.batch = batch
        self.unwritten = torch.isnan(batch.kv.k).any(-1)
        k, v = (torch.nan_to_num(pages, nan=0.5) for pages in batch.kv)
        k_pages, k_read = self.pages(k, k_format)
        v_pages, v_read = self.pages(v, v_format)
        k_tail = self.tail_rows = None
        if k_format is not None and k_format.scales is not None and k_format.scales.tokens == "block":
            k_tail = self.move_unfinished_blocks(k, k_pages, k_read)
        self.kv = QuantisedKVPages(k_pages, v_pages, k.shape[3], v.shape[3], k_tail)
        nan = self.unwritten[..., None]
        self.read = KVPages(k_read.double().masked_fill(nan, torch.nan), v_read.double().masked_fill(nan, torch.nan))

    def pages(self, values, format):
        """(pages, the same dequantised); unwritten slots are NaN wherever a number can be."""
        from labkit.kernels.pages import QuantisedPages

        if format is None:
            return QuantisedPages(values.masked_fill(self.unwritten[..., None], torch.nan)), values
        num_blocks, num_heads, block_size, dim = values.shape
        tokens = values.transpose(1, 2).reshape(num_blocks * block_size, num_heads, dim)
        small = quantise(tokens.cpu().float(), format, block_size=block_size)
        codes = small.codes.view(num_blocks, block_size, num_heads, -1).transpose(1, 2).contiguous()
        if codes.dtype.is_floating_point:
            codes.view(torch.uint8)[self.unwritten.cpu()] = 0x7F
        layers = format.scales is not None and format.scales.tokens == "layer"

        def in_blocks(numbers):
            if numbers is None:
                return None
            numbers = numbers.view(1 if layers else num_blocks, -1, *numbers.shape[1:]).transpose(1, 2).contiguous()
            if numbers.shape[2] > 1:
                numbers[self.unwritten[:, : numbers.shape[1]].cpu()] = torch.nan
            return numbers.to(values.device)

        read = dequantise(small).view(num_blocks, block_size, num_heads, dim).transpose(1, 2).contiguous()
        scales, zero_points = in_blocks(small.scales), in_blocks(small.zero_points)
        return QuantisedPages(codes.to(values.device), scales, zero_points), read.to(values.device)

    def move_unfinished_blocks(self, k, k_pages, k_read):
        """The tail [num_seqs + 1, ...] of every sequence's last block; that block's scales become NaN."""
        table, seq_lens, _ = self.batch.metadata
        num_seqs, block_size = len(seq_lens), self.batch.block_size
        tail = torch.full((num_seqs + 1, *k.shape[1:]), torch.nan, dtype=k.dtype, device=k.device)
        self.tail_rows = torch.arange(num_seqs, 0, -1, dtype=torch.int32, device=k.device)
        for row, length, blocks in zip(self.tail_rows, seq_lens.tolist(), table, strict=True):
            if used := length % block_size:
                block = blocks[length // block_size]
                tail[row, :, :used] = k[block, :, :used]
                k_read[block] = k[block].float()
                for numbers in (k_pages.scales, k_pages.zero_points):
                    if numbers is not None:
                        numbers[block] = torch.nan
        return tail

    def error(self, **extra) -> float:
        """||out - reference|| / ||reference||; NaN when anything leaked."""
        from labkit.kernels import paged_attention, reference

        b = self.batch
        out = b.q.new_full((*b.q.shape[:2], self.kv.head_dim_v), torch.nan)
        paged_attention(b.q, self.kv, *b.metadata, **b.arguments, out=out, tail_rows=self.tail_rows, **extra)
        want = reference.paged_attention(b.q.double(), self.read, *b.metadata, **b.arguments)
        return float((out.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_every_format(paged_batch, tolerance, names):
    batch = paged_batch((4, 2, 64, 64), [100, 33, 64, 1, 0], [1] * 5, block_size=32, padded_rows=1)
    assert Quantised(batch, *(FORMATS[name] for name in names)).error() < tolerance[torch.float32]


@pytest.mark.parametrize(
    "names", [("fp8", "fp8"), ("int8", "int8"), ("int4 a channel", "int4 a token")], ids=" + ".join
)
@pytest.mark.parametrize("heads", [(1, 1, 128, 128), (3, 1, 80, 80), (9, 1, 64, 64), (2, 1, 192, 128)], ids=str)
def test_head_ratios_and_sizes_window_softcap_sinks(paged_batch, tolerance, names, heads):
    sinks = torch.linspace(-1, 3, heads[0])
    options = {"sliding_window": 40, "softcap": 2.0}
    batch = paged_batch(heads, [90, 40], [1, 1], block_size=32, options=options)
    batch.arguments["sinks"] = sinks.to(batch.device)
    assert Quantised(batch, *(FORMATS[name] for name in names)).error() < tolerance[torch.float32]


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
@pytest.mark.parametrize("names", [("int8", "int8"), ("int4 a channel", "int4 a token")], ids=" + ".join)
def test_block_sizes_at_their_borders(paged_batch, tolerance, block_size, names):
    lens = [1, block_size - 1, block_size, block_size + 1]
    batch = paged_batch((4, 2, 64, 64), lens, [1] * 4, block_size=block_size)
    assert Quantised(batch, *(FORMATS[name] for name in names)).error() < tolerance[torch.float32]


def test_several_new_tokens_that_fit_a_decode_tile(paged_batch, tolerance):
    batch = paged_batch((2, 1, 64, 64), [70, 33], [4, 1], block_size=32)
    assert Quantised(batch, INT4.key, INT4.value).error() < tolerance[torch.float32]


@pytest.mark.parametrize("names", [("int8", "int8"), ("int4 a channel", "int4 a token")], ids=" + ".join)
def test_float16(paged_batch, tolerance, names):
    batch = paged_batch((4, 2, 64, 64), [100, 33], [1, 1], block_size=32, dtype=torch.float16)
    assert Quantised(batch, *(FORMATS[name] for name in names)).error() < tolerance[torch.float16]


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_prefill_of_every_format(paged_batch, tolerance, names):
    batch = paged_batch((4, 2, 64, 64), [70, 33, 64, 0], [50, 1, 64, 0], block_size=32, padded_rows=1)
    assert Quantised(batch, *(FORMATS[name] for name in names)).error() < tolerance[torch.float32]


@pytest.mark.parametrize("heads", [(3, 1, 80, 80), (5, 1, 96, 96), (8, 1, 128, 128), (2, 1, 192, 128)], ids=str)
def test_prefill_of_head_ratios_and_sizes_window_softcap_sinks(paged_batch, tolerance, heads):
    options = {"sliding_window": 40, "softcap": 2.0}
    batch = paged_batch(heads, [90, 40], [35, 40], block_size=32, options=options)
    batch.arguments["sinks"] = torch.linspace(-1, 3, heads[0]).to(batch.device)
    assert Quantised(batch, INT4.key, INT4.value).error() < tolerance[torch.float32]


@pytest.mark.parametrize("names", [("int8", "int8"), ("int4 a channel", "int4 a token")], ids=" + ".join)
@pytest.mark.parametrize("block_size", [16, 48])
def test_prefill_at_the_borders_of_blocks(paged_batch, tolerance, block_size, names):
    lens = [2 * block_size - 1, block_size, block_size + 1]
    batch = paged_batch((4, 1, 64, 64), lens, [20, block_size, block_size + 1], block_size=block_size)
    assert Quantised(batch, *(FORMATS[name] for name in names)).error() < tolerance[torch.float32]


def test_prefill_in_float16(paged_batch, tolerance):
    batch = paged_batch((4, 2, 64, 64), [70, 45], [40, 45], block_size=32, dtype=torch.float16)
    assert Quantised(batch, INT4.key, INT4.value).error() < tolerance[torch.float16]


def test_bad_pages_are_named(paged_batch):
    batch = paged_batch((4, 2, 64, 64), [40], [1], block_size=32)
    good = Quantised(batch, INT4.key, INT4.value)

    def attend(kv, tail_rows=good.tail_rows):
        from labkit.kernels import paged_attention

        paged_attention(batch.q, kv, *batch.metadata, **batch.arguments, tail_rows=tail_rows)

    with pytest.raises(ValueError, match="tail_rows must be int32"):
        attend(good.kv, None)
    with pytest.raises(ValueError, match="v must be quantised token by token"):
        attend(good.kv._replace(v=good.kv.k))
    with pytest.raises(ValueError, match="scales must be given"):
        attend(good.kv._replace(k=good.kv.k._replace(scales=None)))
    with pytest.raises(TypeError, match=r"kv\.k\.codes must be int8"):
        attend(good.kv._replace(k=good.kv.k._replace(codes=good.kv.k.codes.int())))
    with pytest.raises(ValueError, match="do not fit codes"):
        attend(good.kv._replace(k=good.kv.k._replace(scales=torch.ones(2, 2, 1, 64))))
    with pytest.raises(ValueError, match="head_dim_k 128"):
        attend(good.kv._replace(head_dim_k=128))


def error_on_a_gpu(paged_batch, heads, names, block_size):
    gen = torch.Generator().manual_seed(heads[0])
    lens = [*(torch.rand(20, generator=gen) ** 3 * 2000).int().clamp_min(1).tolist(), 0, 1, 32, 33]
    batch = paged_batch(heads, lens, [1] * 24, block_size=block_size, dtype=torch.bfloat16, padded_rows=2)
    return Quantised(batch, *(FORMATS[name] for name in names)).error()


@pytest.mark.gpu
@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_every_format_on_a_gpu(paged_batch, names):
    assert error_on_a_gpu(paged_batch, (32, 8, 128, 128), names, 32) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
@pytest.mark.parametrize("heads", [(32, 8, 128, 128), (9, 3, 64, 64), (4, 4, 80, 80), (8, 4, 256, 256)], ids=str)
def test_prefill_of_every_format_on_a_gpu(paged_batch, tolerance, names, heads):
    batch = paged_batch(
        heads, [700, 1100, 33, 0, 500], [333, 1100, 1, 0, 20], block_size=32, dtype=torch.bfloat16, padded_rows=2
    )
    assert Quantised(batch, *(FORMATS[name] for name in names)).error() < tolerance[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "names", [("fp8", "fp8"), ("int8", "int8"), ("int4 a channel", "int4 a token")], ids=" + ".join
)
@pytest.mark.parametrize("heads", [(32, 32, 128, 128), (9, 3, 64, 64), (71, 1, 80, 80)], ids=str)
@pytest.mark.parametrize("block_size", [16, 128])
def test_heads_and_block_sizes_on_a_gpu(paged_batch, heads, names, block_size):
    assert error_on_a_gpu(paged_batch, heads, names, block_size) < 3e-3


@pytest.mark.gpu
def test_cuda_graph_replay_follows_new_lengths(paged_batch):
    from labkit.kernels import Workspace, paged_attention, reference

    batch = paged_batch((8, 2, 128, 128), [900, 30, 2000, 5], [1] * 4, block_size=32, dtype=torch.bfloat16)
    small = Quantised(batch, FORMATS["int8"], FORMATS["int8"])
    workspace = Workspace.allocate(128, "cuda")

    def attend():
        return paged_attention(batch.q, small.kv, *batch.metadata, **batch.arguments, workspace=workspace)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for new in ([899, 29, 1999, 4], [1, 1, 1500, 0], [900, 30, 2000, 5]):
        batch.metadata[1].copy_(torch.tensor(new))
        graph.replay()
        want = reference.paged_attention(batch.q.double(), small.read, *batch.metadata, **batch.arguments)
        assert (captured.double() - want).norm() / want.norm() < 3e-3
