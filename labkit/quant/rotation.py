"""Rotating q and k by one orthogonal matrix leaves every score as it was, and spreads an outlier channel over all.

    (q H) · (k H) = q H Hᵀ kᵀ = q · k

Rotated after RoPE, so that nothing else of the model changes. Source: Ashkboos et al., QuaRot (2024), section 4.
"""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def hadamard(head_dim: int) -> torch.Tensor:
    """A Hadamard matrix divided by sqrt(head_dim), float32 [head_dim, head_dim]: orthogonal, all entries equally large.

    Apply it as ``q @ hadamard(d)`` and ``k @ hadamard(d)``. head_dim is 2^n times the smallest of 1, 12, 20, 24, ...
    that fits: Sylvester's doubling of Paley's matrices, whose order is a prime p = 3 (mod 4) plus 1. So 64, 128 and 256
    work, and 80 = 4 x 20, 96 = 8 x 12.

    The cached matrix is shared: do not change it. Raises ValueError for sizes without such a construction (112, for
    one); TypeError if head_dim is no int.
    """
    if isinstance(head_dim, bool) or not isinstance(head_dim, int):
        raise TypeError(f"head_dim must be an int, got {head_dim!r}")
    core = _core(head_dim)
    matrix = torch.ones(1, 1) if core == 1 else _paley(core - 1)
    while len(matrix) < head_dim:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / head_dim**0.5


def _core(head_dim: int) -> int:
    """The smallest order to begin with: 1, or a prime p = 3 (mod 4) plus 1, times a power of two gives head_dim."""
    order = head_dim
    found = []
    while order >= 1:
        if order == 1 or (order % 4 == 0 and _is_prime(order - 1)):
            found.append(order)
        if order % 2:
            break
        order //= 2
    if not found:
        raise ValueError(
            f"head_dim must be a power of two times 1 or times a prime p = 3 (mod 4) plus 1 (12, 20, 24, ...) to be "
            f"rotated, got {head_dim}"
        )
    return found[-1]


def _paley(p: int) -> torch.Tensor:
    """Paley's first construction: +-1 [p + 1, p + 1], from which numbers are squares modulo the prime p = 3 (mod 4)."""
    squares = {i * i % p for i in range(1, p)}
    sign = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, p)])
    index = torch.arange(p)
    skew = torch.zeros(p + 1, p + 1)
    skew[0, 1:], skew[1:, 0] = 1.0, -1.0
    skew[1:, 1:] = sign[(index[:, None] - index[None, :]) % p]
    return skew + torch.eye(p + 1)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))
