"""write_kv, copy_blocks and swap_blocks against their references."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_cache(device=DEVICE, dtype=torch.float32, heads=(3, 64, 64), num_blocks=6, block_size=16):
    from labkit.kernels import KVPages

    num_heads, dim_k, dim_v = heads
    shape = (num_blocks, num_heads, block_size)
    return KVPages(*(torch.randn(*shape, d).to(device, dtype) for d in (dim_k, dim_v)))


def clone(kv):
    return type(kv)(kv.k.clone(), kv.v.clone())


@pytest.mark.parametrize("heads", [(3, 64, 64), (1, 80, 80), (8, 192, 128), (32, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_write_kv(heads, dtype):
    from labkit.kernels import reference, write_kv

    kv = make_cache(DEVICE, dtype, heads)
    expected = clone(kv)
    slots = torch.tensor([5, -1, 95, 0, 16, -1], device=DEVICE)
    qkv = torch.randn(6, heads[0], heads[1] + heads[2], device=DEVICE).to(dtype)
    k_new, v_new = qkv.split([heads[1], heads[2]], dim=2)  # rows of a fused projection: not contiguous
    write_kv(k_new, v_new, kv, slots)
    reference.write_kv(k_new, v_new, expected, slots)
    assert torch.equal(kv.k, expected.k)
    assert torch.equal(kv.v, expected.v)


def test_write_kv_of_nothing_and_of_padding_only():
    from labkit.kernels import write_kv

    kv = make_cache()
    before = clone(kv)
    nothing, padding = torch.zeros(0, 3, 64, device=DEVICE), torch.zeros(2, 3, 64, device=DEVICE)
    write_kv(nothing, nothing, kv, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    write_kv(padding, padding, kv, torch.tensor([-1, -1], device=DEVICE))
    assert torch.equal(kv.k, before.k)
    with pytest.raises(TypeError, match="slot_mapping must be int64"):
        write_kv(torch.zeros(1, 3, 64), torch.zeros(1, 3, 64), kv, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit a cache of 3 heads"):
        write_kv(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), kv, torch.zeros(1, dtype=torch.int64))


def test_copy_blocks_of_several_layers():
    from labkit.kernels import copy_blocks, reference

    tensors = [tensor for _ in range(2) for tensor in make_cache(heads=(3, 80, 64), dtype=torch.float16)]
    expected = [tensor.clone() for tensor in tensors]
    pairs = torch.tensor([[0, 3], [1, 5], [1, 4]], device=DEVICE)
    copy_blocks(tensors, pairs)
    reference.copy_blocks(expected, pairs)
    for got, want in zip(tensors, expected, strict=True):
        assert torch.equal(got, want)
    copy_blocks(tensors, torch.zeros(0, 2, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="src_dst must be"):
        copy_blocks(tensors, torch.tensor([0, 3]))


def quantised_cache(num_blocks):
    """int4 K with a scale a channel, fp8 V with one scale a layer: odd sizes of all kinds, and random bytes."""
    from labkit.kernels import QuantisedKVPages, QuantisedPages

    def random(*shape, dtype=torch.uint8):
        size = torch.empty(0, dtype=dtype).element_size()
        return torch.randint(0, 100, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, device=DEVICE).view(dtype)

    zero_points = random(num_blocks, 3, 1, 40, dtype=torch.float16)
    k = QuantisedPages(random(num_blocks, 3, 5, 20), random(num_blocks, 3, 1, 40, dtype=torch.float16), zero_points)
    v = QuantisedPages(random(num_blocks, 3, 5, 33, dtype=torch.float8_e4m3fn), torch.ones(1, 1, 1, 1, device=DEVICE))
    return QuantisedKVPages(k, v, 40, 33)


def test_scales_and_zero_points_are_copied_and_swapped_with_their_blocks():
    from labkit.kernels import copy_blocks, reference, swap_blocks

    kv, other = quantised_cache(6), quantised_cache(4)
    assert len(kv.tensors) == 4, "the scale of the whole layer has no blocks"
    expected = [tensor.clone() for tensor in kv.tensors]
    pairs = torch.tensor([[0, 3], [1, 5]], device=DEVICE)
    copy_blocks(kv.tensors, pairs)
    reference.copy_blocks(expected, pairs)
    for got, want in zip(kv.tensors, expected, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    swap_blocks(kv.tensors, other.tensors, torch.tensor([[5, 0], [2, 3]], device=DEVICE))
    for got, want in zip(other.tensors, kv.tensors, strict=True):
        assert torch.equal(got.view(torch.uint8)[[0, 3]], want.view(torch.uint8)[[5, 2]])


def test_swap_blocks_between_two_caches():
    from labkit.kernels import swap_blocks

    source, destination = make_cache(), make_cache(num_blocks=4)
    before = clone(destination)
    swap_blocks(source, destination, torch.tensor([[5, 0], [2, 3]], device=DEVICE))
    assert torch.equal(destination.k[[0, 3]], source.k[[5, 2]])
    assert torch.equal(destination.v[[0, 3]], source.v[[5, 2]])
    assert torch.equal(destination.v[1:3], before.v[1:3])


@pytest.mark.gpu
def test_swap_out_and_in_through_pinned_memory_on_a_stream():
    from labkit.kernels import swap_blocks

    gpu = make_cache("cuda", torch.bfloat16)
    original = clone(gpu)
    host = type(gpu)(*(torch.empty(4, *p.shape[1:], dtype=p.dtype, pin_memory=True) for p in gpu))
    stream = torch.cuda.Stream()
    swap_blocks(gpu, host, torch.tensor([[1, 3], [4, 0]], device="cuda"), stream)
    stream.synchronize()
    assert torch.equal(host.k[3], original.k[1].cpu())
    gpu.k.zero_()
    gpu.v.zero_()
    swap_blocks(host, gpu, torch.tensor([[3, 1], [0, 4]], device="cuda"), stream)
    stream.synchronize()
    assert torch.equal(gpu.v[[1, 4]], original.v[[1, 4]])
    with pytest.raises(ValueError, match="pinned"):
        swap_blocks(gpu, make_cache("cpu", torch.bfloat16), torch.tensor([[0, 0]], device="cuda"))
