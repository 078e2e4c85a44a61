"""Many KV heads to fewer: which shared head stands for a group, and what the query side can take over.

Projections are [num_kv_heads, head_dim, in_features] in float64; a bias is one more input column. A group is
num_kv_heads / num_new consecutive heads, as grouped-query attention counts them.
"""

from __future__ import annotations

import torch


def grouped(heads: torch.Tensor, num_new: int) -> torch.Tensor:
    """[num_kv_heads, head_dim, in] -> [num_new, heads of a group, head_dim, in]."""
    return heads.unflatten(0, (num_new, -1))


def repeat_heads(heads: torch.Tensor, num_new: int) -> torch.Tensor:
    """Each head as often as it takes, copies side by side: query head h keeps reading head h // group."""
    return heads.repeat_interleave(num_new // heads.shape[0], dim=0)


def mean_head(heads: torch.Tensor, num_new: int) -> torch.Tensor:
    """The mean of each group (Ainslie et al., 2023, section 2.1)."""
    return grouped(heads, num_new).mean(dim=1)


def first_head(heads: torch.Tensor, num_new: int) -> torch.Tensor:
    """The first head of each group, the others dropped (Ainslie et al., 2023, section 3.3)."""
    return grouped(heads, num_new)[:, 0]


def relative_error(heads: torch.Tensor, approximation: torch.Tensor) -> float:
    """|heads - approximation| / |heads|, Frobenius."""
    return float((heads - approximation).norm() / heads.norm().clamp_min(torch.finfo(heads.dtype).tiny))


# ---------------------------------------------------------------- svd: K


def shared_key_head(keys: torch.Tensor, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least-squares shared K head of each group, up to what RoPE lets the queries absorb.

    RoPE turns channels (p, p + head_dim / 2) as one complex number, and between q and k only a complex factor for each
    such pair passes through it: with k = c s,  Re(conj(q) e^{i t} c s) = Re(conj(conj(c) q) e^{i t} s).  So a group is
    approximated as  k[g, p] ~ c[g, p] s[p],  for every pair p the best rank-1 matrix [heads of the group, in]: its SVD.

    Returns s [num_new, head_dim, in] and the complex factors c [num_kv_heads, head_dim / 2], of mean square 1.
    """
    pairs = grouped(_as_complex(keys), num_new).transpose(1, 2)  # [num_new, head_dim / 2, heads of the group, in]
    u, s, vh = torch.linalg.svd(pairs, full_matrices=False)
    root = pairs.shape[2] ** 0.5
    factors = root * u[..., 0]
    total = factors.sum(-1, keepdim=True)
    phase = torch.where(total.abs() > 1e-9, total / total.abs(), 1)  # equal heads get c = 1
    shared = phase * s[..., :1] / root * vh[..., 0, :]
    return _as_real(shared), (factors / phase).transpose(1, 2).flatten(0, 1)


def turn_queries(queries: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Queries [num_heads, head_dim, in] for shared keys: each pair times conj(c) of the K head that it used to read."""
    per_query = factors.repeat_interleave(queries.shape[0] // factors.shape[0], dim=0)
    return _as_real(_as_complex(queries) * per_query.conj()[..., None])


def keys_of_shared(shared: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """c s: the K heads [num_kv_heads, head_dim, in] that a shared head stands for."""
    repeated = repeat_heads(_as_complex(shared), factors.shape[0])
    return _as_real(repeated * factors[..., None])


def _as_complex(heads: torch.Tensor) -> torch.Tensor:
    """[n, head_dim, in] -> complex [n, head_dim / 2, in], with channels paired as rotate_half of transformers does."""
    return torch.complex(*heads.chunk(2, dim=-2))


def _as_real(heads: torch.Tensor) -> torch.Tensor:
    return torch.cat([heads.real, heads.imag], dim=-2)


# ---------------------------------------------------------------- svd: V


def shared_value_head(values: torch.Tensor, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least-squares shared V head of each group: v[g] ~ mix[g] s, the rank-head_dim SVD of the stacked heads.

    Nothing stands between V and the output projection, so any mix can be absorbed there.

    Returns s [num_new, head_dim, in] and mix [num_kv_heads, head_dim, head_dim].
    """
    groups = grouped(values, num_new)
    size, head_dim = groups.shape[1:3]
    u, s, vh = torch.linalg.svd(groups.flatten(1, 2), full_matrices=False)
    rank = min(head_dim, s.shape[-1])
    mix = values.new_zeros(num_new, size * head_dim, head_dim)
    shared = torch.zeros_like(groups[:, 0])
    mix[..., :rank] = size**0.5 * u[..., :rank]
    shared[:, :rank] = s[:, :rank, None] * vh[:, :rank] / size**0.5
    return shared, mix.view(-1, head_dim, head_dim)


def mix_outputs(output: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """o_proj [hidden, num_heads, head_dim] for shared values: each head's columns times the mix of its V head."""
    per_query = mix.repeat_interleave(output.shape[1] // mix.shape[0], dim=0)
    return torch.einsum("ohd,hde->ohe", output, per_query)
