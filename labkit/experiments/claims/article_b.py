"""The article on three strategies ("measured: save 60 %"), claim by claim."""

from __future__ import annotations

from . import arithmetic as a
from . import recorded_figures as r
from .claim import Claim

CONV, CODE, SEVEN, THIRTEEN, SEVENTY = "azure_conv", "azure_code", "llama-2-7b", "llama-2-13b", "llama-2-70b"
VLLM_BLOG = "vLLM blog, 2023-06-20"
TABLES = "lengths: Azure LLM inference trace 2023"
GQA = "Ainslie et al., GQA (arXiv 2305.13245)"
RUN = "running the article's code"


def _share(tokens: float) -> float:
    """KV bytes of the 7B as a percentage of KV and weights."""
    return 100 * a.kv(SEVEN) * tokens / (a.kv(SEVEN) * tokens + a.weights(SEVEN))


def _full_length_batch(kv_heads: int, vector_bytes: int = 2 * 128) -> int:
    """Whole requests of 4096 tokens beside the 13B's weights in 90 % of 40 GiB; bytes of a head's K of a token."""
    shape = a.with_kv_heads(THIRTEEN, kv_heads)
    request = 2 * shape.num_layers * kv_heads * vector_bytes * 4096
    return int(a.room(shape, 40) // request)


def _climbed(rung: str) -> dict[str, float]:
    """Requests at once of a rung, and tokens/s as a multiple of the baseline's, for both kinds of lengths."""
    return {
        "n_full": r.ladder(rung, "full"),
        "n_conv": r.ladder(rung, CONV),
        "x_full": r.ladder_times(rung, "full"),
        "x_conv": r.ladder_times(rung, CONV),
    }


MEASURED_LADDER = (
    " Measured in 40 GiB of an H200: {n_full:.0f} of full length and {x_full:.1f} times the tokens/s; {n_conv:.0f} "
    "conversations and {x_conv:.1f} times."
)
INT8_VECTOR = 128 + 4
"""Bytes of 128 channels in INT8 with their fp32 scale."""


ARTICLE_B = (
    Claim(
        "B1",
        "Three strategies, measured: 60 % saved without a loss of quality.",
        "inconsistent",
        "The body says 73 % for all three and 58 % for two, and reports losses in MMLU and perplexity.",
        "reading",
        "the article itself",
    ),
    Claim(
        "B2",
        "In production the KV cache is often two to three times the weights.",
        "depends",
        "For the 7B that is {low:,.0f} to {high:,.0f} tokens in flight: possible on 80 GiB, not on 40, where at most "
        "{most40:.2f} times fits.",
        "KV bytes / weight bytes",
        numbers=lambda: {
            "low": 2 * a.weights(SEVEN) / a.kv(SEVEN),
            "high": 3 * a.weights(SEVEN) / a.kv(SEVEN),
            "most40": a.room(SEVEN, 40) / a.weights(SEVEN),
        },
    ),
    Claim("B3", "Decoding needs the K and V of past tokens.", "correct", "True.", "as A5", "measured"),
    Claim(
        "B4",
        "KV bytes of a request = 2 x layers x hidden size x length x bytes a number.",
        "depends",
        "Right for MHA. For SmolLM2 it gives {wrong:,.0f} bytes a token, the cache takes {right:,.0f}.",
        "as A10",
        numbers=lambda: {"wrong": 2 * 30 * 576 * 2, "right": a.kv("smollm2-135m")},
    ),
    Claim(
        "B5",
        "Llama-2-7B: 32 layers, hidden size 4096, 2 bytes, context 4096.",
        "correct",
        "True.",
        "config.json",
        "config.json of meta-llama/Llama-2-7b-hf",
    ),
    Claim(
        "B6",
        "That is 2.1 GB a request.",
        "correct",
        "{gb:.3f} GB = {gib:.3f} GiB.",
        "the formula of B4",
        numbers=lambda: {"gb": a.gb(a.kv(SEVEN, 4096)), "gib": a.gib(a.kv(SEVEN, 4096))},
    ),
    Claim(
        "B7",
        "At batch 8 it is 16.8 GB, far more than the 14 GB of weights.",
        "depends",
        "{gb:.2f} GB = {gib:.2f} GiB (the article multiplies a rounded number); {times:.2f} times the weights' "
        "{w:.2f} GB. They are equal at batch {even:.2f}.",
        "KV bytes / weight bytes",
        numbers=lambda: {
            "gb": a.gb(a.kv(SEVEN, 8 * 4096)),
            "gib": a.gib(a.kv(SEVEN, 8 * 4096)),
            "times": a.kv(SEVEN, 8 * 4096) / a.weights(SEVEN),
            "w": a.gb(a.weights(SEVEN)),
            "even": a.weights(SEVEN) / a.kv(SEVEN, 4096),
        },
    ),
    Claim("B8", "KV grows linearly with length.", "correct", "True.", "bytes against tokens: a test", "computed"),
    Claim("B9", "KV multiplies with the batch.", "correct", "True.", "bytes against requests: a test", "computed"),
    Claim(
        "B10",
        "In long generation it may grow exponentially.",
        "wrong",
        "It contradicts B8: every token adds the same {step:,.0f} bytes, the first and the last.",
        "difference of bytes from token to token: a test",
        numbers=lambda: {"step": a.kv(SEVEN)},
    ),
    Claim(
        "B11",
        "Over a dialogue of 2000 tokens KV's share of memory rises from 35 to 78 %.",
        "unverifiable",
        "No batch is given. One dialogue with the 7B ends at {one:.1f} %; 78 % needs {tokens:,.0f} tokens in flight.",
        "KV / (KV + weights) over a run (claims.json)",
        numbers=lambda: {"one": _share(2000), "tokens": 0.78 / 0.22 * a.weights(SEVEN) / a.kv(SEVEN)},
    ),
    Claim("B12", "It is called PageAttention.", "wrong", "PagedAttention.", "reading", VLLM_BLOG),
    Claim(
        "B13",
        "Static reservation holds all its memory even if unused; paging allocates on demand.",
        "correct",
        "True, with the conditions of A8 and A16.",
        "as A2",
        TABLES,
    ),
    Claim(
        "B14",
        "Blocks of a fixed size, such as 256 tokens.",
        "depends",
        "256 wastes {conv:.2f} % on conversations and {code:.2f} % on code; 16 wastes {conv16:.2f} and {code16:.2f} "
        "%. One block of 256 tokens of the 7B is {mib:.0f} MiB.",
        "as A27",
        TABLES,
        lambda: {
            "conv": a.block_waste(CONV, 256),
            "code": a.block_waste(CODE, 256),
            "conv16": a.block_waste(CONV, 16),
            "code16": a.block_waste(CODE, 16),
            "mib": a.kv(SEVEN, 256) / 2**20,
        },
    ),
    Claim("B15", "A block table leads from logical to physical blocks.", "correct", "True.", "as A17", VLLM_BLOG),
    Claim(
        "B16",
        "The code of class Block.",
        "wrong",
        "It raises NameError (hidden_size). Completed it allocates float32 on the CPU, {bytes:,.0f} bytes a layer "
        "and block, has no layers or heads, and no pool that a kernel could index.",
        f"{RUN}; a corrected block is a test",
        numbers=lambda: {"bytes": 2 * 256 * 4096 * 4},
    ),
    Claim(
        "B17",
        "The code of class BlockTable.",
        "wrong",
        "Two empty attributes: nothing allocates, appends, forks or frees, and the map has no sequence in its key.",
        f"{RUN}; a corrected table is a test",
    ),
    Claim(
        "B18",
        "7B on an A100-80, no paging: batch 8, 68 % utilisation, 420 tokens/s.",
        "inconsistent",
        "{fits:.0f} reservations of 4096 tokens fit, not 8; 8 of them and the weights are {share:.1f} % of the card. "
        "At batch 8 and 4096 tokens the bound is {rate:.0f} tokens/s, so the speed is plausible.",
        "room / bytes of a reservation",
        numbers=lambda: {
            "fits": int(a.room(SEVEN, 80) // a.kv(SEVEN, 4096)),
            "share": 100 * (a.kv(SEVEN, 8 * 4096) + a.weights(SEVEN)) / (80 * 2**30),
            "rate": 8 * a.A100_BANDWIDTH[80] / (a.kv(SEVEN, 8 * 4096) + a.weights(SEVEN)),
        },
    ),
    Claim(
        "B19",
        "With paging: batch 12, 92 %, 580 tokens/s.",
        "inconsistent",
        "A pool used {ratio:.3f} times as well holds a batch of {batch:.1f}, not 12.",
        "0.92 / 0.68 x 8",
        numbers=lambda: {"ratio": 92 / 68, "batch": 8 * 92 / 68},
    ),
    Claim(
        "B20",
        "Paging cuts waste by 35 to 45 % on varying lengths.",
        "inconsistent",
        "Its own table goes from 32 to 8 % waste: {own:.0f} % less. On conversations a reservation of 4096 wastes "
        "{before:.1f} %, blocks of 16 waste {after:.2f} %.",
        "as A2 and A4",
        TABLES,
        lambda: {
            "own": 100 * (32 - 8) / 32,
            "before": 100 - a.reserved_share(CONV, 4096),
            "after": a.block_waste(CONV, 16),
        },
    ),
    Claim(
        "B21",
        "The gain is larger when lengths differ much.",
        "correct",
        "True: {even:.1f} times the requests where all lengths are equal, {wide:.1f} times where they spread by 1.5 "
        "times their mean. The standard deviation of lengths is {conv:.2f} times the mean for conversations, "
        "{code:.2f} times for code.",
        "gain in utilisation against the spread of lengths, simulated",
        TABLES,
        lambda: {
            **{t: float(a.lengths(f"azure_{t}").std() / a.lengths(f"azure_{t}").mean()) for t in ("conv", "code")},
            "even": r.figure("h200/claims.json", "value", claim="B21", setting="sd / mean 0"),
            "wide": r.figure("h200/claims.json", "value", claim="B21", setting="sd / mean 1.5"),
        },
    ),
    Claim("B22", "MHA has K and V for each head; MQA and GQA share them.", "correct", "True.", "reading", GQA),
    Claim(
        "B23",
        "Memory: MHA 2 L H D, MQA 2 L D, GQA 2 L g D.",
        "depends",
        "The proportions are right; bytes a number are missing, and L is either layers or length.",
        "as A10",
    ),
    Claim(
        "B24",
        "Complexity falls from n^2 d to n^2 d / k and n^2 d / g.",
        "wrong",
        "The FLOPs of scores and values are the same for all three: every query head still meets every key. What falls "
        "is the bytes of KV and the FLOPs of the K and V projections, by heads / groups.",
        "torch's FLOP counter on MHA, GQA and MQA: a test",
        "measured",
    ),
    Claim(
        "B25",
        "Llama-2-70B: MHA has 64 sets of K and V, GQA 8, MQA 1.",
        "correct",
        "The counts are right, but Llama-2-70B is the one with 8: {gqa:,.0f} bytes a token; with 64 it would be "
        "{mha:,.0f}.",
        "config.json",
        numbers=lambda: {"gqa": a.kv(SEVENTY), "mha": 8 * a.kv(SEVENTY)},
    ),
    Claim(
        "B26",
        "The GQA code runs.",
        "wrong",
        "It raises NameError: batch, seq_len, n_heads and dim are not defined.",
        f"{RUN}; a corrected function is a test",
    ),
    Claim(
        "B27",
        "The GQA code maps query heads to KV heads.",
        "wrong",
        "It runs only where the number of KV heads equals the group size, and then sends query head i to KV head i "
        "mod 8 instead of i // group.",
        f"{RUN}; compared with SDPA: a test",
    ),
    Claim(
        "B28",
        "The GQA code computes attention.",
        "wrong",
        "There is no softmax, no scale, no causal mask, and the result keeps a shape that no layer takes.",
        f"{RUN}; compared with SDPA: a test",
    ),
    Claim(
        "B29",
        "MHA takes 18.4 GB, GQA-8 3.2 GB, MQA 1.6 GB.",
        "wrong",
        "Equal lengths give 64 : 8 : 1; the table has {mha:.1f} : {gqa:.0f} : 1. The 70B in 16 bit is {w:.0f} GB and "
        "fits no A100.",
        "bytes and decode time of one layer with 64, 8 and 1 KV heads",
        numbers=lambda: {"mha": 18.4 / 1.6, "gqa": 3.2 / 1.6, "w": a.gb(a.weights(SEVENTY))},
    ),
    Claim(
        "B30",
        "MMLU 68.2, 67.8 and 66.1 for the three.",
        "unverifiable",
        "Llama-2-70B was released with grouped heads only; the other two would have to be trained.",
        "perplexity of a small model before and after conversion, and after uptraining",
        "Touvron et al., Llama 2 (arXiv 2307.09288)",
    ),
    Claim(
        "B31",
        "GQA keeps 97 % of the accuracy.",
        "inconsistent",
        "Its own table says {gqa:.1f} %; {mqa:.1f} % is MQA.",
        "67.8 / 68.2 and 66.1 / 68.2",
        numbers=lambda: {"gqa": 100 * 67.8 / 68.2, "mqa": 100 * 66.1 / 68.2},
    ),
    Claim(
        "B32",
        "And saves memory 4.7 times.",
        "inconsistent",
        "Its own table says {own:.2f} times; the heads say {right:.0f} times.",
        "18.4 / 3.2; 64 / 8",
        numbers=lambda: {"own": 18.4 / 3.2, "right": 64 / 8},
    ),
    Claim(
        "B33",
        "Latency falls from 142 to 89 to 76 ms.",
        "unverifiable",
        "No batch or context is given. The direction is right: fewer bytes are read. One layer of the 70B on an H200 "
        "takes {mha:,.0f}, {gqa:,.0f} and {mqa:,.0f} us for 64 requests of 4096 tokens; for a single one {mha1:,.0f}, "
        "{gqa1:,.0f} and {mqa1:,.0f}.",
        "decode time of one layer with 64, 8 and 1 KV heads",
        "measured",
        lambda: {
            f"{kind.lower()}{end}": r.figure(
                "h200/heads.json", "layer_us", part="decode layer", kind=kind, batch=batch, context=4096
            )
            for kind in ("MHA", "GQA", "MQA")
            for batch, end in ((64, ""), (1, 1))
        },
    ),
    Claim(
        "B34", "INT8 halves the cache.", "depends", "Half and scales (A35). The code shown saves nothing (B36).", "A35"
    ),
    Claim(
        "B35",
        "Each block of K and V has its own scale.",
        "inconsistent",
        "The code takes the maximum of a row: one scale for each token and head.",
        "bytes and perplexity by granularity",
        RUN,
    ),
    Claim(
        "B36",
        "The code of quantize_tensor.",
        "wrong",
        "Its codes keep the input's dtype, so memory grows by the scales; a row of zeros gives NaN. It lacks the "
        "cast to int8 and a guard for zero.",
        f"{RUN}; a corrected quantiser is a test",
    ),
    Claim(
        "B37",
        "The code of dequant_matmul.",
        "wrong",
        "It multiplies by scales that must divide, and does not transpose one of them: results are off by the square "
        "of both, some million times.",
        f"{RUN}; a corrected product is a test",
    ),
    Claim(
        "B38",
        "BF16 4.2 GB, perplexity 3.21; INT8 2.1 GB, 3.25; INT4 1.05 GB, 3.41.",
        "unverifiable",
        "Sizes without scales: with an fp32 scale a row they are {int8:.3f} and {int4:.3f} GB. No model, text or "
        "layout is given for the perplexities.",
        "bytes that are allocated; perplexity of the embedded model",
        numbers=lambda: {"int8": 4.2 * (128 + 4) / 256, "int4": 4.2 * (64 + 4) / 256},
    ),
    Claim(
        "B39",
        "INT8 is negligible: less than 1 % of perplexity.",
        "inconsistent",
        "Its own table says {own:.2f} %.",
        "3.25 / 3.21; perplexity of the embedded model",
        numbers=lambda: {"own": 100 * (3.25 / 3.21 - 1)},
    ),
    Claim(
        "B40",
        "INT4 degrades quality clearly.",
        "depends",
        "Its own table says {own:.2f} %. It depends on who shares a scale: in the embedded model {coarse:.0f} % with "
        "one a token for both, without offset; {fine:.1f} % with one a channel for K and one a token for V.",
        "perplexity of the embedded model by granularity",
        "Liu et al., KIVI (ICML 2024)",
        lambda: {
            "own": 100 * (3.41 / 3.21 - 1),
            "coarse": r.added_perplexity("int4 per token-head, symmetric"),
            "fine": r.added_perplexity("int4 K per channel, V per token"),
        },
    ),
    Claim(
        "B41",
        "Decoding runs at 0.95 times the speed with INT8, 0.82 times with INT4.",
        "depends",
        "Fused, fewer bytes are read and decode gets faster: at equal batch {int8:.2f} times with INT8 and {int4:.2f} "
        "times with INT4 in whole runs of the 7B on an H200. Dequantising before attention is far slower than the "
        "article's figures: {unfused:.2f} times.",
        "fused and unfused ways against bf16, kernels and whole runs",
        "measured",
        lambda: {
            "int8": r.whole_run("int8"),
            "int4": r.whole_run("int4"),
            "unfused": r.whole_run("int8, dequantised before attention"),
        },
    ),
    Claim(
        "B42",
        "Use INT8 in production, and keep key layers in BF16.",
        "opinion",
        "Which layers matter can be measured for each model. In the embedded one none stands out: with the first and "
        "last layer in bf16 INT4 adds {kept:.2f} % of perplexity instead of {all_layers:.2f} %.",
        "perplexity with one layer quantised at a time",
        "measured",
        lambda: {
            "kept": r.added_perplexity("int4 K per channel, V per token, first and last layer bf16"),
            "all_layers": r.added_perplexity("int4 K per channel, V per token"),
        },
    ),
    Claim(
        "B43",
        "13B on an A100-40 at 4096 tokens: batch 4 without anything.",
        "depends",
        "{at90:.0f} fit in 90 % of the card, {at95:.0f} in 95 %, {at100:.0f} in all of it. Measured in 90 % of 40 GiB "
        "of an H200: {measured:.0f}.",
        "room / KV bytes of a request; the combined experiment",
        "measured",
        lambda: (
            {
                f"at{round(100 * share)}": int(a.room(THIRTEEN, 40, share) // a.kv(THIRTEEN, 4096))
                for share in (0.9, 0.95, 1.0)
            }
            | {"measured": r.ladder("baseline", "full")}
        ),
    ),
    Claim(
        "B44",
        "Paging: batch 6, 33 % saved, 1.4 times the throughput.",
        "depends",
        "6 requests of 4096 tokens need {gib:.2f} GiB with the weights: they fit only if requests are shorter. 33 % is "
        "1 - 4/6, a ratio of batches, not of bytes." + MEASURED_LADDER,
        "the combined experiment",
        "measured",
        lambda: {"gib": a.gib(a.kv(THIRTEEN, 6 * 4096) + a.weights(THIRTEEN))} | _climbed("+ paged"),
    ),
    Claim(
        "B45",
        "And GQA-8: batch 10, 58 % saved, 2.1 times.",
        "wrong",
        "8 of 40 KV heads cut KV five times: {fits:.0f} whole requests fit. It is no switch: the model must be "
        "trained on." + MEASURED_LADDER,
        "the combined experiment, with continuous batching",
        f"measured; {GQA}",
        lambda: {"fits": _full_length_batch(8)} | _climbed("+ GQA"),
    ),
    Claim(
        "B46",
        "All three: batch 16, 73 % saved, 3.2 times.",
        "wrong",
        "{fits:.0f} whole requests fit with 8 KV heads in INT8 with scales; a token takes {saved:.0f} % less. "
        "More run at once, since few are at their end." + MEASURED_LADDER,
        "the combined experiment",
        "measured",
        lambda: (
            {
                "fits": _full_length_batch(8, INT8_VECTOR),
                "saved": 100 * (1 - 8 / 40 * INT8_VECTOR / 256),
            }
            | _climbed("+ INT8 KV")
        ),
    ),
    Claim(
        "B47",
        "Throughput 1.4, 2.1 and 3.2 times for batches of 1.5, 2.5 and 4 times.",
        "depends",
        "Right that throughput rises less than the batch: weights are shared by more requests, but each brings its own "
        "prompt. Measured on full lengths: {x_gqa:.1f} and {x_int8:.1f} times for batches of {n_gqa:.1f} and "
        "{n_int8:.1f} times. The sizes are not the article's.",
        "the combined experiment",
        "measured",
        lambda: {
            "x_gqa": r.ladder_times("+ GQA", "full"),
            "x_int8": r.ladder_times("+ INT8 KV", "full"),
            "n_gqa": r.ladder_times("+ GQA", "full", "max_concurrency"),
            "n_int8": r.ladder_times("+ INT8 KV", "full", "max_concurrency"),
        },
    ),
    Claim(
        "B48",
        "The monitor script.",
        "wrong",
        "gc is not imported; it counts views as memory of their own and CPU tensors as GPU memory, prints GiB as GB, "
        "and shows other processes' memory as ours.",
        f"{RUN}; the memory monitor's tests",
    ),
    Claim(
        "B49",
        "The three complement each other.",
        "correct",
        "They do: each adds to the others. In requests at once the factors roughly multiply (GQA {n_alone:.1f} times "
        "alone, {n_with:.1f} times after paging and batching). In tokens/s they need not: INT8 brings {x_without:.1f} "
        "times without GQA, {x_with:.1f} times with it.",
        "factorial ablation in the combined experiment",
        "measured",
        lambda: {
            "n_alone": r.ladder_times("GQA alone", CONV, "max_concurrency"),
            "n_with": r.ladder_times("+ GQA", CONV, "max_concurrency", "+ continuous batching"),
            "x_without": r.ladder_times("INT8 KV without GQA", CONV, before="+ continuous batching"),
            "x_with": r.ladder_times("+ INT8 KV", CONV, before="+ GQA"),
        },
    ),
    Claim(
        "B50",
        "Chat should favour paging, documents GQA for its stability.",
        "opinion",
        "GQA is decided when a model is trained; documents gain most from shared prefixes and quantisation.",
        "reading",
        "reading",
    ),
)
