"""One entry for decode, prefill and mixed batches: the launches, and the memory they need."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from .decode import decode_kernel
from .dequantise import StoredPages, channels_a_scale, is_int4, scale_kind, stored
from .pages import KVPages, QuantisedKVPages, check_attention_inputs
from .prefill import prefill_kernel
from .rope import launch_options
from .tuning import ANY, DecodeTile, PrefillTile, decode_programs, decode_tile, prefill_tile, quantised_decode_tile

FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
LEAST_DIM = 16  # the shortest side of a matrix instruction
LEAST_DIM_INT4 = 2 * LEAST_DIM  # int4 tiles hold half the channels
SCALE_AXES = ("scale_block", "scale_head", "scale_slot")


@functools.cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """(compute capability as 90, number of multiprocessors). Without a GPU, the interpreter plays a tiny sm_90."""
    if device.type != "cuda":
        return 90, 1
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of `paged_attention`: allocate once, pass to every call on one stream, whatever its batch is.

    The decode launch has W programs, each with two slots of `rows` query rows (decode.py). Slots are cut from
    partial_acc: float32 [capacity, head_dim_v], partial_m and partial_l: float32 [capacity], so 2 W rows <= capacity.
    arrivals: int32 [capacity], zero between launches.
    """

    partial_acc: torch.Tensor
    partial_m: torch.Tensor
    partial_l: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, head_dim_v: int, device: torch.device | str) -> Workspace:
        """For models with this head size: 128 query rows a multiprocessor, 8.7 MB on an H200 with head_dim_v 128."""
        device = torch.empty(0, device=device).device
        widest = triton.next_power_of_2(max(LEAST_DIM_INT4, head_dim_v))  # of any format, see padded_head_dims
        return cls.with_capacity(128 * device_limits(device)[1], widest, device)

    @classmethod
    def with_capacity(cls, capacity: int, padded_head_dim_v: int, device: torch.device) -> Workspace:
        return cls(
            torch.empty(capacity, padded_head_dim_v, dtype=torch.float32, device=device),
            torch.empty(capacity, dtype=torch.float32, device=device),
            torch.empty(capacity, dtype=torch.float32, device=device),
            torch.zeros(capacity, dtype=torch.int32, device=device),
        )


def paged_attention(
    q: torch.Tensor,
    kv: KVPages | QuantisedKVPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    tail_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of new tokens over their paged context.

    q: [num_tokens, num_q_heads, head_dim_k], float16, bfloat16 or float32 (for tests: slow on a GPU); the tokens of all
        sequences one after the other. Their K and V are in the cache already (`write_kv`).
    kv: pages [num_blocks, num_kv_heads, block_size, head_dim], dtype of q, or quantised ones; num_q_heads is a multiple
        of num_kv_heads. 8-bit and 4-bit codes are multiplied as float16, with float32 sums.
    block_table: int32 [num_seqs, max_blocks]. seq_lens: int32 [num_seqs], context length with this step's tokens.
    query_start_loc: int32 [num_seqs + 1], sequence s owns rows query_start_loc[s] .. query_start_loc[s + 1] of q.
    scale: positive factor on q · k. max_query_len: most new tokens of any sequence (a host number; 1 = pure decode).
    sliding_window: query position i sees key position j iff 0 <= i - j < sliding_window.
    softcap: scores become softcap * tanh(score / softcap). sinks: [num_q_heads], one extra logit a head.
    workspace: scratch memory (`Workspace.allocate`), allocated here when None. out: contiguous along head_dim.
    tail_rows: int32 [num_seqs], each sequence's row of kv.k_tail; needed where kv has one.

    Returns [num_tokens, num_q_heads, head_dim_v]. Rows with seq_len 0 and rows beyond query_start_loc[-1] are zeros.
    Reads no tensor on the host, so it can be captured in a CUDA graph. Two calls that share a workspace must not run
    at the same time. Raises ValueError or TypeError, naming the argument, on shapes and types it cannot serve.
    """
    check_attention_inputs(q, kv, block_table, seq_lens, query_start_loc, sliding_window, softcap, sinks, tail_rows)
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if q.dtype == torch.bfloat16 and not q.is_cuda:
        raise TypeError("Triton's interpreter cannot multiply bfloat16 matrices: on CPU use float16 or float32")
    num_tokens, num_q_heads, head_dim_k = q.shape
    head_dim_v = kv.head_dim_v if isinstance(kv, QuantisedKVPages) else kv.v.shape[3]
    if out is None:
        out = q.new_empty(num_tokens, num_q_heads, head_dim_v)
    num_seqs = seq_lens.shape[0]
    if num_seqs == 0 or num_tokens == 0:
        return out.zero_()

    group = num_q_heads // kv.num_kv_heads
    dk, dv = padded_head_dims(kv, head_dim_k, head_dim_v)
    capability, num_sms = device_limits(q.device)
    # With prompts in the step one tile serves any number of sequences: a batch that grows compiles nothing new.
    pairs_per_sm = num_seqs * kv.num_kv_heads / num_sms if max_query_len == 1 else ANY
    head_dim = max(head_dim_k, head_dim_v)
    tile = decode_tile_for(kv, capability, group, head_dim, pairs_per_sm, q.element_size())
    if workspace is None:
        workspace = Workspace.allocate(head_dim_v, q.device)
    launch = AttentionLaunch(
        q, kv, block_table, seq_lens, query_start_loc, out, scale, sliding_window, softcap, sinks, group, dk, dv,
        tail_rows,
    )  # fmt: skip
    launch.decode(tile, workspace, max_query_len, num_sms).run()
    if max_query_len * group > tile.block_m:
        launch.prefill(prefill_tile_for(kv, capability, group, head_dim, q.element_size()), tile.block_m).run()
    return out


def padded_head_dims(kv: KVPages | QuantisedKVPages, head_dim_k: int, head_dim_v: int) -> tuple[Any, Any]:
    """Head sizes as the kernels' tiles have them: powers of two that a matrix instruction takes."""
    int4 = isinstance(kv, QuantisedKVPages) and (is_int4(kv.k, head_dim_k) or is_int4(kv.v, head_dim_v))
    least = LEAST_DIM_INT4 if int4 else LEAST_DIM
    return max(least, triton.next_power_of_2(head_dim_k)), max(least, triton.next_power_of_2(head_dim_v))


def decode_tile_for(
    kv: KVPages | QuantisedKVPages, capability: int, group: int, head_dim: int, pairs_per_sm: float, element_size: int
) -> DecodeTile:
    """The tile of the decode kernel. Raises ValueError for float8 pages on a GPU without float8 (before sm_89)."""
    if isinstance(kv, KVPages):
        return decode_tile(capability, group, head_dim, pairs_per_sm, element_size)
    if capability < 89 and FLOAT8 & {kv.k.codes.dtype, kv.v.codes.dtype}:
        raise ValueError(f"kv holds float8, which compute capability {capability / 10} lacks (8.9 or newer): use int8")
    tile = quantised_decode_tile(capability, is_int4(kv.k, kv.head_dim_k), group, head_dim)
    if scale_kind(kv.k) == "channel":  # a tile then lies in one block and has one row of scales
        tile = replace(tile, block_n=min(tile.block_n, kv.block_size & -kv.block_size))
    return tile


def prefill_tile_for(
    kv: KVPages | QuantisedKVPages, capability: int, group: int, head_dim: int, element_size: int
) -> PrefillTile:
    """The tile of the prefill kernel; over quantised pages half as many keys, whose codes and values both need room."""
    tile = prefill_tile(capability, group, head_dim, element_size)
    return tile if isinstance(kv, KVPages) else replace(tile, block_n=max(16, tile.block_n // 2))


def lanes_for(num_seqs: int, with_prompts: bool) -> int:
    """Lanes by which a program finds its sequence; with prompts in the step one number up to 256, as for tiles."""
    sizes = (256, 1024) if with_prompts else (32, 256, 1024)
    return next((lanes for lanes in sizes if num_seqs <= lanes), 1 << (num_seqs - 1).bit_length())


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A kernel with all that its launch needs; compile_report.py compiles the same thing without a GPU."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    tile: DecodeTile | PrefillTile

    def options(self) -> dict[str, Any]:
        """How to compile and launch: warps a program, early launch, and a cap on registers where the tile has one."""
        cap = {} if self.tile.max_registers is None else {"maxnreg": self.tile.max_registers}
        early = {"launch_pdl": True} if self.constants.get("EARLY") else {}
        return {"num_warps": self.tile.num_warps} | cap | early

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options())


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """The arguments that both kernels share, and the two calls made from them."""

    q: torch.Tensor
    kv: KVPages | QuantisedKVPages
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    out: torch.Tensor
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    group: int
    dk: int
    dv: int
    tail_rows: torch.Tensor | None = None

    def tensors(self):
        return (
            self.q, *self.stored_pages(), self.block_table, self.seq_lens, self.query_start_loc,
            self.seq_lens if self.tail_rows is None else self.tail_rows,
            self.q if self.sinks is None else self.sinks, self.out,
        )  # fmt: skip

    def scalars(self):
        """window, inner_scale, score_scale (units of log2: see softmax.py), then strides of q, out and block_table."""
        q, out, cap = self.q, self.out, self.softcap
        return (
            self.sliding_window or 0, self.scale / (cap or 1.0), (cap or self.scale) * 1.4426950408889634,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), self.block_table.stride(0),
        )  # fmt: skip

    def constants(self, with_prompts: bool):
        return dict(
            GROUP=self.group, HEAD_DIM_K=self.q.shape[2], HEAD_DIM_V=self.out.shape[2], DK=self.dk, DV=self.dv,
            BLOCK_SIZE=self.kv.block_size, SAME_STRIDES=self.same_strides(),
            SEQS=lanes_for(self.seq_lens.shape[0], with_prompts), SOFTCAP=self.softcap is not None,
            WINDOWED=self.sliding_window is not None, HAS_SINKS=self.sinks is not None,
            PRECISION="ieee" if self.q.element_size() == 4 else "tf32",
        )  # fmt: skip

    def stored_pages(self) -> tuple[StoredPages, StoredPages]:
        """K and V as the kernels take them."""
        kv = self.kv
        if isinstance(kv, KVPages):
            return stored(kv.k), stored(kv.v)
        return stored(kv.k, kv.k_tail), stored(kv.v, kv.v_tail)

    def same_strides(self) -> bool:
        """An offset computed for K (and for its scales) holds for V too."""
        k, v = self.stored_pages()
        return all(getattr(k, axis) == getattr(v, axis) for axis in ("block", "head", "slot", *SCALE_AXES))

    def formats(self):
        """What the kernels know of the formats of K and V when they are compiled."""
        kv, dim_k, dim_v = self.kv, self.q.shape[2], self.out.shape[2]
        return dict(
            K_INT4=is_int4(kv.k, dim_k), K_SCALE=scale_kind(kv.k), K_CHANNELS=channels_a_scale(kv.k, dim_k),
            V_INT4=is_int4(kv.v, dim_v), V_SCALE=scale_kind(kv.v), V_CHANNELS=channels_a_scale(kv.v, dim_v),
        )  # fmt: skip

    def decode(self, tile: DecodeTile, workspace: Workspace, max_query_len: int, num_sms: int) -> KernelCall:
        rows = triton.next_power_of_2(self.group) if max_query_len == 1 else tile.block_m
        pairs = self.seq_lens.shape[0] * self.kv.num_kv_heads
        slots_for = max(1, workspace.partial_m.shape[0] // (2 * rows))  # one program alone never needs a slot
        programs = min(decode_programs(pairs, tile.programs_per_sm, num_sms), slots_for)
        arguments = (
            *self.tensors(), workspace.partial_acc, workspace.partial_m, workspace.partial_l, workspace.arrivals,
            self.seq_lens.shape[0], self.q.shape[0], *self.scalars(),
        )  # fmt: skip
        constants = dict(
            NUM_KV_HEADS=self.kv.num_kv_heads, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            ROWS=rows, PARTS=min(8, max(1, 1024 * tile.num_warps // (rows * self.dv))),
            MIN_TILES=triton.cdiv(tile.min_tokens, tile.block_n), STAGES=tile.num_stages,
            MULTI_QUERY=max_query_len > 1,
            TRANSPOSED=not isinstance(self.kv, KVPages) or tile.block_m < 16,
            EARLY=launch_options(self.q.device)["EARLY"],
        )  # fmt: skip
        constants |= self.constants(max_query_len > 1) | self.formats()
        return KernelCall(decode_kernel, (programs,), arguments, constants, tile)

    def prefill(self, tile: PrefillTile, max_decode_rows: int) -> KernelCall:
        block_q = tile.block_m // self.group
        grid = (self.kv.num_kv_heads, self.q.shape[0] // block_q + self.seq_lens.shape[0])
        constants = dict(
            BLOCK_M=tile.block_m, BLOCK_Q=block_q, BLOCK_N=tile.block_n, MAX_DECODE_ROWS=max_decode_rows,
            STAGES=tile.num_stages, QUANTISED=not isinstance(self.kv, KVPages),
        )  # fmt: skip
        arguments = (*self.tensors(), self.seq_lens.shape[0], *self.scalars())
        constants |= self.constants(True) | self.formats()
        return KernelCall(prefill_kernel, grid, arguments, constants, tile)
