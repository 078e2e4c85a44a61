"""Backend `torch`: paged attention in vectorised PyTorch, the default on a CPU.

Sequences that decode are gathered out of their pages into one padded batch; a sequence with several new tokens is
gathered alone. What does not change from layer to layer (row numbers, masks) is made once a step.

    pages [num_blocks, heads, block_size, D]  seen as rows of one (block, head) each ─► row = block * heads + head
    block_table [[7, 2], [5, 0]], 1 head      ─► rows [7, 2, 5, 0] ─► one index_select ─► [2, heads, 2 * block_size, D]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from labkit.kernels import KVPages, QuantisedKVPages, elementwise_reference
from labkit.models import FusedAttentionInfo

from .input_batch import InputBatch
from .torch_quantised import QuantisedReader, QuantisedWriter

_SAME_SIZE_BLOCKS = 16
_QUERY_ROWS = 256


class TorchPagedAttention:
    """Attention over the paged cache for one step's batch; used by every layer of the forward pass."""

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        self._slots = batch.slot_mapping
        self._block_size = block_size
        self._fresh_blocks = self._slots[self._slots % block_size == 0] // block_size
        self._write_rows: dict[int, torch.Tensor] = {}
        self._quantised = QuantisedWriter(batch, block_size)
        self._groups = [_DecodeGroup(batch, members, block_size) for members in _decode_groups(batch, block_size)]
        self._prefills = [
            _Prefill(batch, index, block_size) for index, length in enumerate(batch.host_query_lens) if length > 1
        ]

    def write(self, k: torch.Tensor, v: torch.Tensor, kv: KVPages | QuantisedKVPages) -> None:
        """Put the step's K and V [num_tokens, num_kv_heads, D] into their slots."""
        if isinstance(kv, QuantisedKVPages):
            self._quantised.write(k, v, kv)
            return
        heads = kv.num_kv_heads
        rows = self._write_rows.get(heads)
        if rows is None:
            size = self._block_size
            head_rows = (self._slots // size)[:, None] * heads + torch.arange(heads, device=self._slots.device)
            rows = (head_rows * size + (self._slots % size)[:, None]).flatten()
            self._write_rows[heads] = rows
        for new, pages in ((k, kv.k), (v, kv.v)):
            # A block is cleared when its first slot is written: what gathering reads behind a sequence's end may be
            # anything but NaN, which no mask removes from 0 x NaN.
            if len(self._fresh_blocks):
                pages.index_fill_(0, self._fresh_blocks, 0)
            pages.view(-1, pages.shape[3]).index_copy_(0, rows, new.reshape(-1, pages.shape[3]).to(pages.dtype))

    def rotate_and_write(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: KVPages
    ) -> torch.Tensor:
        """Rotate q and k of the merged projection and put K and V into their slots; returns q."""
        q, k, v = self.rotate(info, qkv, cos, sin)
        self.write(k, v, kv)
        return q

    def rotate(
        self, info: FusedAttentionInfo, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotate q and k of the merged projection; returns q, k and v."""
        heads = qkv.unflatten(1, (-1, info.head_dim))
        qk, v = heads.split([info.num_q_heads + info.num_kv_heads, info.num_kv_heads], dim=1)
        if info.q_norm is not None and info.k_norm is not None:
            q, k = qk.split([info.num_q_heads, info.num_kv_heads], dim=1)
            normed = ((q, info.q_norm), (k, info.k_norm))
            qk = torch.cat([elementwise_reference.rms_norm(x, weight, info.norm_eps) for x, weight in normed], dim=1)
        rotated = elementwise_reference.rotate(qk, cos.to(qk.dtype), sin.to(qk.dtype))
        return rotated[:, : info.num_q_heads], rotated[:, info.num_q_heads :], v

    def attend(
        self,
        q: torch.Tensor,
        kv: KVPages | QuantisedKVPages,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Causal attention of q [num_tokens, num_q_heads, D_k] over the cache: [num_tokens, num_q_heads, D_v]."""
        options = _Options(scale, sliding_window, softcap, sinks)
        if len(self._groups) == 1 and not self._prefills:
            return self._groups[0].attend(q, kv, options)  # all decode: q is the group's batch already
        head_dim_v = kv.head_dim_v if isinstance(kv, QuantisedKVPages) else kv.v.shape[3]
        out = q.new_empty(q.shape[0], q.shape[1], head_dim_v)
        for group in self._groups:
            out[group.tokens] = group.attend(q[group.tokens], kv, options)
        for prefill in self._prefills:
            out[prefill.tokens] = prefill.attend(q[prefill.tokens], kv, options)
        return out


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def _decode_groups(batch: InputBatch, block_size: int) -> list[list[int]]:
    """Sequences with one new token, those of similar length together, so that padding at most doubles the reading."""
    groups: dict[int, list[int]] = {}
    for index, (length, query_len) in enumerate(zip(batch.host_seq_lens, batch.host_query_lens, strict=True)):
        if query_len == 1:
            num_blocks = -(-length // block_size)
            groups.setdefault((num_blocks // _SAME_SIZE_BLOCKS).bit_length(), []).append(index)
    return list(groups.values())


def _gather(pages: torch.Tensor, rows: torch.Tensor, num_seqs: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Pages by (block, head) row numbers, as [num_seqs, heads, max_blocks * block_size, D]: a copy."""
    num_blocks, heads, block_size, head_dim = pages.shape
    flat = torch.index_select(pages.view(num_blocks * heads, block_size * head_dim), 0, rows, out=out)
    return flat.view(num_seqs, heads, -1, head_dim)


def _page_rows(block_table: torch.Tensor, heads: int) -> torch.Tensor:
    """Row numbers for :func:`_gather`: block_table int64 [num_seqs, max_blocks] -> [num_seqs * heads * max_blocks]."""
    return (block_table[:, None, :] * heads + torch.arange(heads, device=block_table.device)[:, None]).flatten()


class _DecodeGroup:
    """Sequences with one new token each, padded to the longest."""

    def __init__(self, batch: InputBatch, members: list[int], block_size: int) -> None:
        device = batch.token_ids.device
        lengths = [batch.host_seq_lens[i] for i in members]
        index = torch.tensor(members, device=device)
        self.tokens = batch.query_start_loc[index].long()
        max_blocks = -(-max(lengths) // block_size)
        self._lengths = torch.tensor(lengths, device=device)[:, None]
        table = batch.block_table[index, :max_blocks].long()
        is_used = torch.arange(max_blocks, device=device) * block_size < self._lengths
        self._block_table = torch.where(is_used, table, table[:, :1])  # pad with a block that was written
        self._positions = torch.arange(max_blocks * block_size, device=device)
        rows = None if batch.tail_rows is None else batch.tail_rows[index]
        self._quantised = QuantisedReader(self._block_table, lengths, rows, block_size)
        self._buffers: dict[tuple[str, int, int], torch.Tensor] = {}
        self._page_rows: dict[int, torch.Tensor] = {}
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def attend(self, q: torch.Tensor, kv: KVPages | QuantisedKVPages, options: _Options) -> torch.Tensor:
        num_seqs, num_q_heads, head_dim = q.shape
        heads = kv.num_kv_heads
        k, v = self._quantised.read(kv, q.dtype) if isinstance(kv, QuantisedKVPages) else self._gather(kv, num_seqs)
        # The query heads that share a KV head stand as rows of one small matrix: no K or V is repeated.
        grouped = q.reshape(num_seqs, heads, num_q_heads // heads, head_dim)
        out = _attention(grouped, k, v, self._mask(options.sliding_window, q.dtype), options)
        return out.reshape(num_seqs, num_q_heads, v.shape[3])

    def _gather(self, kv: KVPages, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._page_rows.get(kv.num_kv_heads)
        if rows is None:
            rows = self._page_rows[kv.num_kv_heads] = _page_rows(self._block_table, kv.num_kv_heads)
        k = _gather(kv.k, rows, num_seqs, self._buffer("k", kv.k, rows))
        return k, _gather(kv.v, rows, num_seqs, self._buffer("v", kv.v, rows))

    def _buffer(self, name: str, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Room to gather into, used by one layer after the other: fresh memory would cost page faults in each."""
        key = (name, len(rows), pages.shape[3])
        if key not in self._buffers:
            self._buffers[key] = pages.new_empty(len(rows), pages.shape[2] * pages.shape[3])
        return self._buffers[key]

    def _mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """0 where the query sees, -inf where not: [num_seqs, 1, 1, max_len]."""
        mask = self._masks.get((sliding_window, dtype))
        if mask is None:
            visible = self._positions < self._lengths
            if sliding_window is not None:
                visible &= self._positions >= self._lengths - sliding_window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            mask = mask.masked_fill_(~visible, -math.inf)[:, None, None, :]
            self._masks[sliding_window, dtype] = mask
        return mask


@dataclass(slots=True)
class _Prefill:
    """One sequence with several new tokens."""

    batch: InputBatch
    index: int
    block_size: int
    tokens: slice = field(init=False)
    _length: int = field(init=False)
    _block_table: torch.Tensor = field(init=False)
    _quantised: QuantisedReader = field(init=False)
    _page_rows: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        start = sum(self.batch.host_query_lens[: self.index])
        self.tokens = slice(start, start + self.batch.host_query_lens[self.index])
        self._length = self.batch.host_seq_lens[self.index]
        sequence = slice(self.index, self.index + 1)
        self._block_table = self.batch.block_table[sequence, : -(-self._length // self.block_size)].long()
        rows = None if self.batch.tail_rows is None else self.batch.tail_rows[sequence]
        self._quantised = QuantisedReader(self._block_table, [self._length], rows, self.block_size)

    def attend(self, q: torch.Tensor, kv: KVPages | QuantisedKVPages, options: _Options) -> torch.Tensor:
        k, v = self._quantised.read(kv, q.dtype) if isinstance(kv, QuantisedKVPages) else self._gather(kv)
        repeats = q.shape[1] // kv.num_kv_heads
        k, v = (x[:, :, : self._length].repeat_interleave(repeats, 1) for x in (k, v))
        batched = q.transpose(0, 1)[None]
        window = options.sliding_window
        starts_at_zero = self._length == q.shape[0] and (window is None or window >= self._length)
        if starts_at_zero and options.softcap is None and options.sinks is None:
            out = scaled_dot_product_attention(batched, k, v, is_causal=True, scale=options.scale)
            return out[0].transpose(0, 1)
        # A few hundred query rows at a time: scores of a whole chunk over a long context would not fit.
        mask = self._mask(window, q.dtype)
        parts = [
            _attention(batched[:, :, r : r + _QUERY_ROWS], k, v, mask[:, :, r : r + _QUERY_ROWS], options, by_head=True)
            for r in range(0, q.shape[0], _QUERY_ROWS)
        ]
        return torch.cat(parts, dim=2)[0].transpose(0, 1)

    def _gather(self, kv: KVPages) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._page_rows.get(kv.num_kv_heads)
        if rows is None:
            rows = self._page_rows[kv.num_kv_heads] = _page_rows(self._block_table, kv.num_kv_heads)
        return _gather(kv.k, rows, 1), _gather(kv.v, rows, 1)

    def _mask(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees, -inf where not: [1, 1, query_len, seq_len]."""
        mask = self._masks.get((sliding_window, dtype))
        if mask is None:
            device = self.batch.token_ids.device
            key_pos = torch.arange(self._length, device=device)
            query_pos = key_pos[self._length - (self.tokens.stop - self.tokens.start) :, None]
            visible = key_pos <= query_pos
            if sliding_window is not None:
                visible &= query_pos - key_pos < sliding_window
            mask = torch.zeros(visible.shape, dtype=dtype, device=device)
            mask = self._masks[sliding_window, dtype] = mask.masked_fill_(~visible, -math.inf)[None, None]
        return mask


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: _Options, by_head: bool = False
) -> torch.Tensor:
    """q [n, heads, rows, D_k], k and v [n, heads, len, D], mask broadcast to [n, heads, rows, len].

    Rows are the query heads of a KV head or, ``by_head``, the query positions of one head: sinks go with heads.
    """
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores + mask
    if options.sinks is not None:  # one more score in the denominator, with no value behind it
        shape = (1, q.shape[1], 1, 1) if by_head else (1, q.shape[1], q.shape[2], 1)
        sinks = options.sinks.float().view(shape).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=3)
    probs = scores.softmax(-1)[..., : k.shape[2]]
    return torch.matmul(probs.to(v.dtype), v)
