"""The article on vLLM and PagedAttention, claim by claim."""

from __future__ import annotations

from . import arithmetic as a
from . import recorded_figures as r
from .claim import Claim

CONV, CODE, SEVEN, THIRTEEN, SEVENTY = "azure_conv", "azure_code", "llama-2-7b", "llama-2-13b", "llama-2-70b"
VLLM_BLOG = "vLLM blog, 2023-06-20"
PAGED_PAPER = "Kwon et al., PagedAttention (arXiv 2309.06180)"
VLLM = "vllm-project/vllm, vllm/config/cache.py at 002f10e0"
UNFUSED = "int8, dequantised before attention"
MEASURED = "h200/claims.json"
TABLES = "lengths: Azure LLM inference trace 2023"


def _swap_gain(model: str) -> float:
    """Tokens/s with preempted requests swapped out, over those with requests computed again."""
    swap, again = (
        r.figure("h200/engine.json", "tokens_per_second", op="preemption", model=model, by=by)
        for by in ("swap", "recompute")
    )
    return swap / again


def _share_of_bound(batch: int) -> float:
    """Percent of the tokens/s that reading weights and KV would allow."""
    quantity, setting = "share of the bandwidth bound", f"batch {batch} x 1024 tokens"
    return r.figure(MEASURED, "value", claim="A34", quantity=quantity, setting=setting)


def _prefill_ratio(kv_format: str) -> float:
    """Time of prefill attention over quantised pages / over bf16 ones: 4 prompts of 2048 tokens, MHA."""
    match = {"op": "prefill", "heads": [32, 32, 128], "batch": "4x2048"}
    return r.figure("h200/quant.json", "ratio_to_bf16", **match, kv_format=kv_format)


ARTICLE_A = (
    Claim(
        "A1",
        "The memory of the KV cache is the core bottleneck of inference throughput.",
        "depends",
        "A decode step reads weights and KV: for the 13B in 16 bit {w:.1f} GB of weights, {ms:.1f} ms on an A100-80 "
        "even with an empty cache. KV dominates from {knee:,.0f} tokens in flight. Prefill is bound by arithmetic. "
        "Measured with the 7B on an H200: {one:.1f} ms with 1,024 tokens in flight, {many:.1f} ms with 131,072.",
        "milliseconds of a decode step against tokens in flight: the knee is where KV bytes = weight bytes",
        numbers=lambda: {
            "w": a.gb(a.weights(THIRTEEN)),
            "ms": 1e3 * a.weights(THIRTEEN) / a.A100_BANDWIDTH[80],
            "knee": a.weights(THIRTEEN) / a.kv(THIRTEEN),
            "one": r.figure(MEASURED, "value", claim="A1", setting="batch 1 x 1024 tokens"),
            "many": r.figure(MEASURED, "value", claim="A1", setting="batch 128 x 1024 tokens"),
        },
    ),
    Claim(
        "A2",
        "Contiguous allocation leaves so much fragmentation that under 40 % of memory is used.",
        "depends",
        "Of a reservation of 4096 slots {conv:.1f} % is filled when conversations end, {code:.1f} % for code; of the "
        "next power of two {pow2:.1f} %. Most of it is reservation, not fragmentation, and `generate` of transformers "
        "reserves nothing.",
        "live tokens / reserved slots when each request ends",
        f"{TABLES}; 20.4 to 38.2 % in {PAGED_PAPER}",
        lambda: {
            "conv": a.reserved_share(CONV, 4096),
            "code": a.reserved_share(CODE, 4096),
            "pow2": a.power_of_two_share(CONV),
        },
    ),
    Claim(
        "A3",
        "PagedAttention keeps KV in pages of a fixed size, after the virtual memory of operating systems.",
        "correct",
        "True, without page faults: the scheduler allocates a block before the kernel runs.",
        "reading; unit tests of the block pool",
        VLLM_BLOG,
    ),
    Claim(
        "A4",
        "Utilisation rises to nearly 100 % (lead) or over 96 % (body).",
        "inconsistent",
        "The last block of a request is half empty: with blocks of 16, {b16:.2f} % of the slots are wasted on "
        "conversations, with 256 {b256:.2f} %. Short requests fare worse, and free blocks are not counted.",
        "empty slots in the blocks of ended requests, block sizes 8 to 256",
        f"{TABLES}; 96.3 % in {PAGED_PAPER}",
        lambda: {"b16": a.block_waste(CONV, 16), "b256": a.block_waste(CONV, 256)},
    ),
    Claim(
        "A5",
        "Every generated token needs its K and V cached.",
        "correct",
        "True in every layer and KV head, for prompt tokens too. Without it each step computes all K and V again.",
        "the same logits with and without a cache: a test",
        "measured",
    ),
    Claim(
        "A6",
        "Llama-2-13B at batch 32 and 2048 tokens needs about 16 GB of KV cache.",
        "wrong",
        "{gb:.2f} GB = {gib:.2f} GiB, {times:.2f} times as much; 16 GB hold {tokens:,.0f} tokens.",
        "2 x 40 layers x 40 heads x 128 x 2 bytes x 2048 x 32; allocated on a GPU",
        numbers=lambda: {
            "gb": a.gb(a.kv(THIRTEEN, 2048 * 32)),
            "gib": a.gib(a.kv(THIRTEEN, 2048 * 32)),
            "times": a.kv(THIRTEEN, 2048 * 32) / 16e9,
            "tokens": 16e9 / a.kv(THIRTEEN),
        },
    ),
    Claim(
        "A7",
        "That is more than the weights.",
        "inconsistent",
        "16 GB are less than the weights' {w:.2f} GB; the right number is {times:.2f} times the weights.",
        "KV bytes / weight bytes",
        numbers=lambda: {
            "w": a.gb(a.weights(THIRTEEN)),
            "times": a.kv(THIRTEEN, 2048 * 32) / a.weights(THIRTEEN),
        },
    ),
    Claim(
        "A8",
        "Frameworks reserve contiguous KV of the maximum length for each request.",
        "depends",
        "FasterTransformer, Orca and transformers' StaticCache do. DynamicCache grows by concatenation, pads to the "
        "longest of the batch and holds a layer twice while it copies it. Eight short prompts through the 7B take "
        "{static:.1f} GiB with StaticCache, {dynamic:.1f} with DynamicCache; their K and V in blocks are {blocks:.1f}.",
        "peak memory of StaticCache, DynamicCache and blocks for the same batch",
        "measured",
        lambda: {
            name: r.figure(MEASURED, "value", claim="A8", quantity=quantity)
            for name, quantity in {
                "static": "peak memory, StaticCache",
                "dynamic": "peak memory, DynamicCache",
                "blocks": "KV in blocks of 16",
            }.items()
        },
    ),
    Claim(
        "A9",
        "Real lengths are far below the maximum, so most of a reservation is wasted.",
        "correct",
        "Half of all conversations end by {p50:,.0f} tokens, 95 % by {p95:,.0f}.",
        "percentiles of total length",
        TABLES,
        lambda: {"p50": float(a.np.median(a.lengths(CONV))), "p95": float(a.np.percentile(a.lengths(CONV), 95))},
    ),
    Claim(
        "A10",
        "KV bytes = 2 x layers x heads x head size x length x batch x bytes a number.",
        "depends",
        "Right for MHA. With grouped heads it must be the number of KV heads: as written Llama-2-70B comes out "
        "{seventy:.0f} times and SmolLM2 {smol:.0f} times too big. Blocks, scales and windows are left out.",
        "formula against bytes allocated for MHA, GQA and MQA",
        numbers=lambda: {"seventy": 64 / 8, "smol": 9 / 3},
    ),
    Claim(
        "A11",
        "Llama-2-13B has 80 layers, 40 heads and a head size of 128.",
        "wrong",
        "{layers:.0f} layers; 80 is the 70B. Heads and head size are right.",
        "the model's config.json",
        "config.json of meta-llama/Llama-2-13b-hf",
        lambda: {"layers": a.model_shape(THIRTEEN).num_layers},
    ),
    Claim(
        "A12",
        "One request of 2048 tokens takes about 0.8 GB.",
        "wrong",
        "{gb:.3f} GB = {gib:.4f} GiB; with the article's own 80 layers {gb80:.3f} GB. 0.8 is what comes out without "
        "the factor 2 for K and V.",
        "the formula of A10",
        f"computed; up to 1.7 GB in {VLLM_BLOG}",
        lambda: {
            "gb": a.gb(a.kv(THIRTEEN, 2048)),
            "gib": a.gib(a.kv(THIRTEEN, 2048)),
            "gb80": 2 * a.gb(a.kv(THIRTEEN, 2048)),
        },
    ),
    Claim(
        "A13",
        "At batch 32 that is 25.6 GB.",
        "wrong",
        "32 x 0.8 is 25.6, but 0.8 is wrong and A6 says 16 for the same thing. It is {gb:.2f} GB.",
        "the formula of A10",
        numbers=lambda: {"gb": a.gb(a.kv(THIRTEEN, 2048 * 32))},
    ),
    Claim(
        "A14",
        "Fragmentation keeps the usable batch far below the theoretical one.",
        "correct",
        "On 80 GiB the 13B leaves room for {reserved:.1f} reservations of 4096 tokens, or for {paged:.1f} "
        "conversations of average length in blocks.",
        "requests that run at once in three allocators of equal bytes",
        TABLES,
        lambda: {
            "reserved": a.room(THIRTEEN, 80) / a.kv(THIRTEEN, 4096),
            "paged": a.room(THIRTEEN, 80) / a.kv(THIRTEEN, round(float(a.lengths(CONV).mean()))),
        },
    ),
    Claim(
        "A15",
        "A block holds the K and V of a fixed number of tokens.",
        "correct",
        "True; one block number means the same tokens in every layer.",
        "reading; unit tests",
        VLLM_BLOG,
    ),
    Claim(
        "A16",
        "Blocks are allocated on demand, not for the whole sequence in advance.",
        "correct",
        "True for a sequence. The pool is allocated when the engine starts, so nvidia-smi shows it full all the time.",
        "pool occupancy over a run, against the memory of the process",
        "measured",
    ),
    Claim(
        "A17",
        "Blocks of a sequence may lie apart; a block table maps logical to physical ones.",
        "correct",
        "True.",
        "reading; unit tests",
        VLLM_BLOG,
    ),
    Claim(
        "A18",
        "Example: with blocks of 16, A has blocks 0, 3, 7 and B has 1, 2, 5.",
        "correct",
        "Disjoint, {slots:.0f} slots each; token 20 of A lies in slot {slot20:.0f}, token 47 in slot {slot47:.0f}.",
        "slot = block x 16 + position % 16: a test",
        numbers=lambda: {"slots": 3 * 16, "slot20": 3 * 16 + 20 % 16, "slot47": 7 * 16 + 47 % 16},
    ),
    Claim(
        "A19",
        "The kernel joins the scattered KV together and then computes standard attention.",
        "wrong",
        "It reads blocks where they are, with a running softmax. Joining first would move every byte three times and "
        "need {mb:.1f} MB of scratch for 2048 tokens of one layer of the 13B. With 32 such requests on an H200 it "
        "takes {slower:.1f} times as long.",
        "the paged kernel against joining the blocks and then SDPA: time and peak memory",
        "measured",
        lambda: {
            "mb": a.kv(THIRTEEN, 2048) / a.model_shape(THIRTEEN).num_layers / 1e6,
            "slower": r.figure(MEASURED, "value", claim="A19", quantity="decode step, blocks joined, then SDPA")
            / r.figure(MEASURED, "value", claim="A19", quantity="decode step, blocks read in place"),
        },
    ),
    Claim(
        "A20",
        "Blocks come back as soon as a sequence ends.",
        "depends",
        "True without prefix caching. With it, which the article's own configuration turns on, full blocks stay as "
        "cached until others need the room.",
        "free, cached and referenced blocks after the last request ended: a test",
        VLLM,
    ),
    Claim("A21", "vLLM implements PagedAttention.", "correct", "True.", "reading", VLLM_BLOG),
    Claim(
        "A22",
        "A vLLM configuration with swap_space=8 and enable_prefix_caching=True.",
        "depends",
        "It worked until 2025. swap_space is no longer an argument since vLLM 0.18; prefix caching and blocks of 16 "
        "are the defaults.",
        "reading",
        f"{VLLM}; unslothai/unsloth-zoo#1210, vllm-project/vllm#48549",
    ),
    Claim(
        "A23",
        "tensor_parallel_size=2 splits the model over two GPUs.",
        "correct",
        "True, and not needed for the 13B's {w:.0f} GB on one card of 40 or 80 GB. Each GPU then keeps {heads:.0f} "
        "KV heads: {kv:,.0f} bytes a token.",
        "KV bytes of each rank = total / 2",
        numbers=lambda: {
            "w": a.gb(a.weights(THIRTEEN)),
            "heads": a.model_shape(THIRTEEN).kv_heads_per_gpu(2),
            "kv": a.kv(THIRTEEN) / 2,
        },
    ),
    Claim(
        "A24",
        "gpu_memory_utilization is the fraction of GPU memory that is used.",
        "correct",
        "True: weights, activations and KV pool of this engine together.",
        "the engine's own memory plan",
        VLLM,
    ),
    Claim(
        "A25",
        "swap_space is CPU memory to swap to, in GB.",
        "depends",
        "It was GiB for each GPU: 8 on two GPUs are 16 GiB in all, {tokens:,.0f} tokens of the 13B.",
        "16 GiB / KV bytes a token",
        "vLLM before 0.18",
        lambda: {"tokens": 16 * 2**30 / a.kv(THIRTEEN)},
    ),
    Claim(
        "A26", "max_model_len is the longest sequence, 4096.", "correct", "True, Llama-2's limit.", "config.json", VLLM
    ),
    Claim(
        "A27",
        "The block size trades fragmentation against the kernel's speed; 16 is a balance.",
        "depends",
        "Waste grows: {b8:.2f} % at 8, {b16:.2f} % at 16, {b128:.2f} % at 128. Whether speed grows with it depends on "
        "the kernel: this lab's reaches {s16:.0f} % of an H200's read bandwidth at 16 and {s256:.0f} % at 256 (MHA), "
        "so there is nothing to balance.",
        "the decode kernel's GB/s and the pool's waste, block sizes 16 to 256",
        TABLES,
        lambda: {
            **{f"b{size}": a.block_waste(CONV, size) for size in (8, 16, 128)},
            **{
                f"s{size}": r.figure(
                    "h200/kernels.json",
                    "percent_of_ceiling",
                    **{"op": "decode", "system": "labkit", "batch": "32x2048", "heads": [32, 32, 128]},
                    block_size=size,
                )
                for size in (16, 256)
            },
        },
    ),
    Claim(
        "A28",
        "Keep gpu_memory_utilization between 0.85 and 0.95 to avoid running out of memory.",
        "depends",
        "What must stay free is the peak of activations, which grows with the tokens of a step, plus what other "
        "processes hold. For the 7B that peak is {b512:.2f} GiB with steps of 512 tokens and {b16384:.2f} GiB with "
        "16,384; 10 % of 80 GiB are 8. A fraction is a rule of thumb.",
        "peak of activations against max_num_batched_tokens",
        "measured",
        lambda: {
            f"b{budget}": r.figure(MEASURED, "value", claim="A28", setting=f"max_num_batched_tokens {budget}")
            for budget in (512, 16384)
        },
    ),
    Claim(
        "A29",
        "swap_space moves idle KV to the CPU, so more requests are served than GPU memory holds.",
        "depends",
        "True, at a price: 2048 tokens of the 13B are {gb:.2f} GB, {ms:.0f} ms over a 25 GB/s bus each way. On "
        "an H200 swapping gave {mha:.2f} times the tokens/s of computing again with the 7B, {gqa:.2f} times with "
        "Llama-3-8B, whose KV is four times smaller. vLLM V1 only computes again.",
        "swap against recompute on a pool of half the need",
        "vllm-project/vllm#27984",
        lambda: {
            "gb": a.gb(a.kv(THIRTEEN, 2048)),
            "ms": 1e3 * a.kv(THIRTEEN, 2048) / 25e9,
            "mha": _swap_gain(SEVEN),
            "gqa": _swap_gain("llama-3-8b"),
        },
    ),
    Claim(
        "A30",
        "Static batching waits until a batch is full; requests queue.",
        "correct",
        "True and incomplete: the batch also runs until its longest member ends, so of its slots {static:.0f} % hold "
        "tokens over a run of conversations, with continuous batching {continuous:.0f} %.",
        "static and continuous batching in the combined experiment",
        "measured",
        lambda: {
            "static": 100 * r.ladder("+ paged", CONV, "live_utilisation"),
            "continuous": 100 * r.ladder("+ continuous batching", CONV, "live_utilisation"),
        },
    ),
    Claim(
        "A31",
        "vLLM's continuous batching adds and removes requests while a batch runs.",
        "correct",
        "True; the idea is Orca's (iteration-level scheduling).",
        "reading; the scheduler's tests",
        "Yu et al., Orca (OSDI 2022)",
    ),
    Claim(
        "A32",
        "64 prompts passed to llm.generate show dynamic scheduling.",
        "depends",
        "The code is right but all requests arrive at once: it shows a queue that drains, not requests that join.",
        "arrivals over time, in the lesson on batching",
        "reading",
    ),
    Claim(
        "A33",
        "On Llama-2-13B vLLM gives more than 24 times the throughput of transformers.",
        "wrong",
        "The source says up to 24 times, for LLaMA-13B on an A100-40 against the transformers of 2023; 2 to 4 times "
        "over Orca and FasterTransformer.",
        "the same requests through transformers' generate and through an engine",
        f"{VLLM_BLOG}; {PAGED_PAPER}",
    ),
    Claim(
        "A34",
        "One A100 gives over 2000 tokens/s.",
        "depends",
        "The bound at full memory on an A100-40 is {c256:,.0f} tokens/s at a context of 256, {c1024:,.0f} at 1024; on "
        "an A100-80 {e1024:,.0f} at 1024. No batch or length is given. On an H200 this lab's engine reaches {low:.0f} "
        "to {high:.0f} % of such a bound (7B, batches of 1 to 128).",
        "batch x bandwidth / (weights + KV)",
        numbers=lambda: {
            "c256": a.full_rate(THIRTEEN, 40, 256),
            "c1024": a.full_rate(THIRTEEN, 40, 1024),
            "e1024": a.full_rate(THIRTEEN, 80, 1024),
            "low": _share_of_bound(1),
            "high": _share_of_bound(128),
        },
    ),
    Claim(
        "A35",
        "INT8 or FP8 halves the KV cache.",
        "correct",
        "Half of the values, plus scales: with an fp32 scale a token and head {d128:.3f} at head size 128 and "
        "{d64:.3f} at 64.",
        "(D + 4) / 2 D; bytes that an engine allocates",
        numbers=lambda: {"d128": (128 + 4) / 256, "d64": (64 + 4) / 128},
    ),
    Claim(
        "A36",
        "The loss of accuracy is usually within 1 %.",
        "depends",
        "Of which metric is not said. In the embedded model's perplexity INT8 adds {int8:.2f} % and FP8 {fp8:.2f} %; "
        "INT4 adds {int4:.1f} % with K's scales by channel and {coarse:.0f} % with symmetric scales by token.",
        "perplexity with a quantised cache, with its standard error",
        "measured",
        lambda: {
            "int8": r.added_perplexity("int8 per token-head"),
            "fp8": r.added_perplexity("fp8 e4m3 per token-head"),
            "int4": r.added_perplexity("int4 K per channel, V per token"),
            "coarse": r.added_perplexity("int4 per token-head, symmetric"),
        },
    ),
    Claim(
        "A37",
        'FP8 KV cache: quantization="fp8", kv_cache_dtype="fp8".',
        "wrong",
        "Two switches: the first quantises weights. Only kv_cache_dtype is the KV cache, so effects of the pair "
        "cannot be laid to it: in the embedded model fp8 weights add {w:.1f} % of perplexity, an fp8 cache {kv:.1f} %.",
        "weights only, KV only, both",
        "vLLM documentation, quantization",
        lambda: {
            "w": r.figure("fp8_ablation.json", "delta_ppl_percent", weights="fp8", kv_cache="bfloat16"),
            "kv": r.figure("fp8_ablation.json", "delta_ppl_percent", weights="bfloat16", kv_cache="fp8"),
        },
    ),
    Claim(
        "A38",
        "On H100 and H200 FP8 costs almost no performance.",
        "depends",
        "Unpacked inside the decode kernel it is a gain, since half the bytes are read: whole runs of the 7B make "
        "{run:.2f} times the tokens/s on an H200 at equal batch, {most:.2f} times with all that fit. Attention of "
        "prompts takes {prefill:.1f} times as long.",
        "decode, prefill and whole runs with bf16 and FP8 KV",
        "measured",
        lambda: {
            "run": r.whole_run("fp8"),
            "most": r.whole_run("fp8", batch=63),
            "prefill": _prefill_ratio("fp8"),
        },
    ),
    Claim(
        "A39",
        "On an A100 INT8 costs about 5 % of throughput.",
        "unverifiable",
        "No mechanism is given. On an H200 an engine with INT8 makes {fused:.2f} times the tokens/s of bf16 if the "
        "decode kernel unpacks it, {unfused:.2f} times if it is dequantised before attention.",
        "fused and unfused INT8 against bf16, whole runs of the 7B",
        "measured on an H200, no A100 at hand",
        lambda: {"fused": r.whole_run("int8"), "unfused": r.whole_run(UNFUSED)},
    ),
    Claim(
        "A40",
        "After quantisation the batch can double and throughput still rises.",
        "correct",
        "Slots in the pool nearly double: on 80 GiB the 13B has {half:,.0f} in 16 bit and {full:,.0f} in INT8. "
        "Tokens/s rise, but by less than the batch: {conv:.2f} and {full_length:.2f} times in 40 GiB of an H200, "
        "{run:.2f} times in whole runs of the 7B; with INT4 {int4:.2f} times.",
        "largest batch and tokens/s at equal bytes of pool",
        "measured",
        lambda: {
            "half": a.room(THIRTEEN, 80) / a.kv(THIRTEEN),
            "full": a.room(THIRTEEN, 80) / a.kv(THIRTEEN) * 256 / (128 + 4),
            "conv": r.ladder_times("+ INT8 KV", CONV, before="+ GQA"),
            "full_length": r.ladder_times("+ INT8 KV", "full", before="+ GQA"),
            "run": r.whole_run("int8", batch=61),
            "int4": r.whole_run("int4", batch=107),
        },
    ),
    Claim(
        "A41",
        "Paging, continuous batching and KV quantisation are the complete solution.",
        "opinion",
        "Grouped heads, prefix sharing, chunked prefill and eviction are missing from it. In the combined experiment 8 "
        "KV heads instead of 40 bring more than any one of the three: {gqa:.1f} times the tokens/s at full length.",
        "the combined experiment",
        "measured",
        lambda: {"gqa": r.ladder_times("+ GQA", "full", before="+ continuous batching")},
    ),
)
