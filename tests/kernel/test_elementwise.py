"""Norm, activation and rotary kernels against the references in float64, and their compilation for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}  # one rounding of the result, relative


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def error(actual, expected):
    assert torch.isfinite(actual).all()
    return float((actual.double() - expected).norm() / expected.norm())


def cos_sin(num_tokens, head_dim, dtype=torch.float32, scaling=1.0):
    from labkit.kernels import elementwise_reference

    inv_freq = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE, dtype=torch.float32) / head_dim)
    positions = torch.arange(num_tokens, device=DEVICE) * 37 % 1009
    return tuple(t.to(dtype) for t in elementwise_reference.rope_cos_sin(positions, inv_freq, scaling))


def nan_cache(num_kv_heads, head_dim, dtype, block_size=16, num_blocks=5):
    from labkit.kernels import KVPages

    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return KVPages(*(torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (3, 4096), (5, 1000)], ids=str)
def test_rms_norm(shape, dtype):
    from labkit.kernels import elementwise, elementwise_reference

    wide = 3 * randn(shape[0], 2 * shape[1], dtype=dtype)
    x, weight = wide[:, : shape[1]], 1 + 0.1 * randn(shape[1], dtype=dtype, seed=1)  # rows of a wider tensor
    expected = elementwise_reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert error(elementwise.rms_norm(x, weight, 1e-5), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 96, 1024, 1536 + 5])
def test_silu_mul(size, dtype):
    from labkit.kernels import elementwise, elementwise_reference

    gate_up = 4 * randn(5, 2 * size, dtype=dtype)
    gate_up[0, 0], gate_up[1, 0] = -80.0, 80.0  # both ends of the sigmoid
    expected = elementwise_reference.silu_mul(gate_up.double())
    assert error(elementwise.silu_mul(gate_up), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_cos_sin_at_large_positions(head_dim):
    from labkit.kernels import elementwise

    inv_freq = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE, dtype=torch.float32) / head_dim)
    positions = torch.tensor([0, 1, 511, 4095, 131_071], device=DEVICE)
    cos, sin = elementwise.rope_cos_sin(positions, inv_freq, 1.25)
    angle = (positions.float()[:, None] * inv_freq).double().repeat(1, 2)  # the product is float32 in transformers too
    torch.testing.assert_close(cos.double(), 1.25 * angle.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin.double(), 1.25 * angle.sin(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 1, 80), (6, 2, 96), (16, 16, 128), (2, 1, 2)], ids=str)
def test_rope_and_write_kv(heads, dtype, normed):
    from labkit.kernels import KVPages, elementwise, elementwise_reference

    num_q_heads, num_kv_heads, head_dim = heads
    slots = torch.tensor([17, -1, 0, 79, 16], device=DEVICE)
    qkv = randn(5, (num_q_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    before = qkv.clone()
    cos, sin = cos_sin(5, head_dim, dtype)
    norms: dict[str, Any] = {}
    if normed:
        norms = {name: 1 + 0.1 * randn(head_dim, dtype=dtype, seed=s) for name, s in (("q_norm", 1), ("k_norm", 2))}
    kv = nan_cache(num_kv_heads, head_dim, dtype)
    q = elementwise.rope_and_write_kv(qkv, cos, sin, kv, slots, num_q_heads, **norms)

    expected_kv = KVPages(*(t.double() for t in nan_cache(num_kv_heads, head_dim, dtype)))
    wide: dict[str, Any] = {name: weight.double() for name, weight in norms.items()}
    expected_q = elementwise_reference.rope_and_write_kv(
        qkv.double(), cos.double(), sin.double(), expected_kv, slots, num_q_heads, **wide
    )
    assert q.shape == (5, num_q_heads, head_dim)
    assert q.dtype == dtype
    assert error(q, expected_q) < TOLERANCE[dtype]
    assert torch.equal(qkv, before)
    written = ~expected_kv.k.isnan()
    assert torch.equal(~kv.k.isnan(), written)  # the padded token wrote nothing, every other one all it should
    assert torch.equal(~kv.v.isnan(), written)
    assert error(kv.k[written], expected_kv.k[written]) < TOLERANCE[dtype]
    assert torch.equal(kv.v[written].double(), expected_kv.v[written])  # v is only moved

    q_view, k, v = elementwise.rope(qkv, cos, sin, num_q_heads, num_kv_heads, **norms)
    assert torch.equal(q_view, q)
    assert torch.equal(k[0], kv.k[1, :, 1])  # slot 17
    assert torch.equal(v[0], kv.v[1, :, 1])


def test_rotation_is_the_one_of_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from labkit.kernels import elementwise

    q, k = randn(1, 4, 3, 8), randn(1, 2, 3, 8, seed=1)  # [batch, heads, tokens, D]
    cos, sin = cos_sin(3, 8)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    rows = [t[0].transpose(0, 1).flatten(1) for t in (q, k, k)]
    rotated_q, rotated_k, _ = elementwise.rope(torch.cat(rows, dim=1), cos, sin, 4, 2)
    torch.testing.assert_close(rotated_q, expected_q[0].transpose(0, 1))
    torch.testing.assert_close(rotated_k, expected_k[0].transpose(0, 1))


def test_no_tokens():
    from labkit.kernels import elementwise

    kv = nan_cache(2, 8, torch.float32)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    q = elementwise.rope_and_write_kv(randn(0, 48), randn(0, 8), randn(0, 8), kv, slots, 2)
    assert q.shape == (0, 2, 8)
    assert elementwise.rms_norm(randn(0, 8), randn(8), 1e-6).shape == (0, 8)
    assert elementwise.silu_mul(randn(0, 8)).shape == (0, 4)


def test_bad_input_is_named():
    from labkit.kernels import elementwise

    kv = nan_cache(2, 8, torch.float32)
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    qkv, cos = randn(3, 48), randn(3, 8)
    with pytest.raises(ValueError, match="qkv has 47 columns"):
        elementwise.rope_and_write_kv(randn(3, 47), cos, cos, kv, slots, 2)
    with pytest.raises(ValueError, match=r"sin must be \[3, 8\]"):
        elementwise.rope_and_write_kv(qkv, cos, randn(2, 8), kv, slots, 2)
    with pytest.raises(TypeError, match="slot_mapping must be int64"):
        elementwise.rope_and_write_kv(qkv, cos, cos, kv, slots.int(), 2)
    with pytest.raises(ValueError, match="do not fit head_dim 8"):
        elementwise.rope_and_write_kv(qkv, cos, cos, nan_cache(2, 16, torch.float32), slots, 2)
    with pytest.raises(ValueError, match="q_norm and k_norm must be given both"):
        elementwise.rope(qkv, cos, cos, 2, 2, q_norm=randn(8))
    with pytest.raises(ValueError, match="even number of columns"):
        elementwise.silu_mul(randn(3, 7))
    with pytest.raises(ValueError, match=r"weight must be \[8\]"):
        elementwise.rms_norm(cos, randn(7), 1e-6)


def test_kernels_compile_for_each_gpu_generation():
    """In a process of its own: this one may have Triton's interpreter on."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["80", "90", "100"]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from labkit.kernels import elementwise, rope

POINTERS = {"position_ids": "*i64", "slot_mapping": "*i64", "inv_freq": "*fp32", "cos": "*fp32", "sin": "*fp32"}
FLOATS = {"eps", "scaling"}
ROPE = dict(NUM_Q_HEADS=32, NUM_KV_HEADS=8, HEADS=16, HALF=40, WIDTH=64, NORM=True)
KERNELS = [
    (elementwise.rms_norm_kernel, {"x", "weight", "out"}, dict(SIZE=4096, ROWS=1, WIDTH=4096)),
    (elementwise.silu_mul_kernel, {"gate_up", "out"}, dict(SIZE=11008, WIDTH=1024)),
    (rope.rope_cos_sin_kernel, set(), dict(HALF=64, WIDTH=64)),
    (rope.rope_kernel, {"qkv", "q_norm", "k_norm"}, ROPE),
    (rope.rope_and_write_kv_kernel, {"qkv", "q_norm", "k_norm", "q", "k", "v"}, ROPE | dict(BLOCK_SIZE=16)),
]
for capability in (80, 90, 100):
    for kernel, tensors, constants in KERNELS:
        constants = constants | dict(EARLY=capability >= 90)
        signature = {
            name: "constexpr" if name in constants
            else "*bf16" if name in tensors
            else POINTERS.get(name, "fp32" if name in FLOATS else "i32")
            for name in kernel.arg_names
        }
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        triton.compile(source, target=GPUTarget("cuda", capability, 32))
    print(capability)
"""
