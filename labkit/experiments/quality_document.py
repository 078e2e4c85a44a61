"""The page docs/quality.md, from recorded results; a test holds the page to them.

python -m labkit.experiments.quality_document     rewrites the page
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from .recorded import results

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"
SHIPPED = "int4 K per channel, V per token"
_NOT_YET = "Not measured yet: `labkit experiment {command} --out data/results/{file}`."


def page() -> str:
    """The whole page as Markdown."""
    parts = [_formats(results("quality.json")), _engine(), _layers(), _failures(), _fp8()]
    return "\n".join(line for part in parts for line in part) + "\n"


def _formats(quality: dict[str, Any]) -> list[str]:
    rows, source = quality["rows"], quality["provenance"]
    base, shipped = rows[0], next(row for row in rows if row["policy"] == SHIPPED)
    lines = [
        "# What a quantised KV cache costs in quality",
        "",
        _paragraph(
            f"{source['model']}, activations in {source['dtype']}; the first {base['tokens']:,} tokens of",
            f"`data/text/{base['text']}` in windows of {base['ctx']:,}, blocks of {base['block_size']}. Unquantised",
            f"perplexity {base['ppl']:.4f}. {quality['measured']}.",
        ),
        "",
        _paragraph(
            "dNLL is the mean over tokens of the loss minus the loss of the same token with the unquantised cache, in",
            "nats, ± its standard error with tokens taken as independent. Every K and V is quantised, also within the",
            "window that wrote it. Bits a value include scales; those with tails also the block of each sequence that",
            "waits in 16 bit because its tokens will share scales. Static scales were measured on the",
            f"{quality['calibration_tokens']:,} tokens that follow the measured ones. Last run: {_where(source)}; each",
            "row of data/results/quality.json names its own commit and device.",
        ),
        "",
        "| K and V | bits a value | with tails | perplexity | change | dNLL | device |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows[1:]:
        name = f"**{row['policy']}**" if row["policy"] == SHIPPED else row["policy"]
        bits = f"{row['bits_per_value']:.4g} | {row['bits_with_tails']:.4g}"
        change = f"{row['ppl']:.3f} | {row['delta_ppl_percent']:+.3f} % | {_dnll(row)}"
        lines.append(f"| {name} | {bits} | {change} | {row['device']} |")
    return [
        *lines,
        "",
        _paragraph(
            '`kv_cache_dtype="int4"` is the row in bold: K one scale and offset a channel for the 32 tokens of a',
            "block, V one a token. K: 4 + (16 + 16) / 32 = 5 bits; V: 4 + (16 + 16) / 64 = 4.5 bits; together 4.75.",
            "The newest block of K waits in 16 bit until it is full: 16 x 32 / 1,024 / 2 = 0.25 bits a value in a",
            f"sequence of 1,024 tokens, so {shipped['bits_with_tails']:.2f} in all, and no layer is in 16 bit.",
            f"The {shipped['delta_ppl_percent']:+.2f} % are measured without the help of the tail.",
        ),
        "",
        _paragraph(
            "What to read from it: at 8 bits, int8 with a scale for each token and head loses nothing that this text",
            "can show, and less than fp8 in as many bits. At 4 bits the axis of K's scale decides: one a channel costs",
            "1 % (symmetric 3 %), one a token 8 % (symmetric 23 %). The rotation helps integers whose channels share a",
            "scale, and harms where each channel has its own; fp8, whose steps grow with its values, gains nothing.",
        ),
        "",
    ]


def _engine() -> list[str]:
    record = results("engine_quality.json")
    lines = [
        "## By the engine itself",
        "",
        _paragraph(
            "The same text through `LLM(kv_cache_dtype=...)`: its quantised pages and its attention, by the",
            "log-probabilities of prompts. Tests hold it to what the reference quantiser says.",
        ),
        "",
    ]
    if not record:
        return [*lines, _NOT_YET.format(command="engine-quality", file="engine_quality.json"), ""]
    lines += ["| kv_cache_dtype | attention | bytes a token | perplexity | dNLL |", "| --- | --- | --- | --- | --- |"]
    for row in record["rows"]:
        cells = f"{row['attention_backend']} | {row['bytes_per_token']:,} | {row['ppl']:.3f} | {_dnll(row)}"
        lines.append(f"| {row['kv_cache_dtype']} | {cells} |")
    return [*lines, "", f"{_where(record['provenance'])}.", ""]


def _layers() -> list[str]:
    record = results("kv_sensitivity.json")
    lines = ["## Which layers bear it", "", "Loss when one layer's K and V alone are quantised.", ""]
    if not record:
        return [*lines, _NOT_YET.format(command="sensitivity", file="kv_sensitivity.json"), ""]
    lines += ["| format | layers, the most sensitive first | sum of all layers |", "| --- | --- | --- |"]
    for name in dict.fromkeys(row["format"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["format"] == name]
        worst = sorted(rows, key=lambda row: -row["dnll"])[:5]
        text = ", ".join(f"{row['layer']} ({_dnll(row)})" for row in worst)
        lines.append(f"| {name} | {text} | {sum(row['dnll'] for row in rows):.4f} |")
    tokens = record["rows"][0]["tokens"]
    return [*lines, "", f"First {tokens:,} tokens; {_where(record['provenance'])}.", ""]


def _failures() -> list[str]:
    record = results("kv_failures.json")
    lines = [
        "## Where it fails",
        "",
        _paragraph(
            "**Outlier channels.** A scale shared by the channels of a token must reach the largest one. The table has",
            "the error that attention sees: the root mean square error of q·k / sqrt(D) in nats, what is equal for all",
            "keys left out.",
        ),
        "",
    ]
    if not record:
        return [*lines, _NOT_YET.format(command="failures", file="kv_failures.json"), ""]
    cases = list(dict.fromkeys(row["case"] for row in record["keys"]))
    lines += [f"| K | {' | '.join(cases)} |", "| --- |" + " --- |" * len(cases)]
    for name in dict.fromkeys(row["policy"] for row in record["keys"]):
        errors = [f"{row['score_error']:.3f}" for row in record["keys"] if row["policy"] == name]
        lines.append(f"| {name} | {' | '.join(errors)} |")
    biased = record["key_bias"]
    sizes = list(dict.fromkeys(row["key_bias"] for row in biased))
    lines += [
        "",
        _paragraph(
            "**Models with a bias in k_proj**, as Qwen2 has. A constant that is added to a channel of all keys changes",
            "all scores of a query alike, so softmax ignores it; the range of a token's scale does not. A zero point",
            "per channel takes it away. Here a bias is added to the two slowest channels of each head of the embedded",
            f"model ({biased[0]['tokens']:,} tokens, V in bf16), and dNLL is against the same model unquantised: its",
            "perplexity hardly changes, the loss in 4 bits does.",
        ),
        "",
        f"| K | {' | '.join(f'bias {size:g}' for size in sizes)} |",
        "| --- |" + " --- |" * len(sizes),
    ]
    for name in dict.fromkeys(row["policy"] for row in biased):
        rows = [row for row in biased if row["policy"] == name]
        cells = [f"perplexity {row['ppl']:.2f}" if name == "unquantised" else _dnll(row) for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", f"{_where(record['provenance'])}.", ""]


def _fp8() -> list[str]:
    record = results("fp8_ablation.json")
    lines = [
        "## fp8 weights are not an fp8 KV cache",
        "",
        _paragraph(
            '`LLM(quantization="fp8")` stores the projections of the layers in fp8 and multiplies in fp8 (torchao, on',
            'a GPU with sm_89 or newer): fewer bytes of weights, once. `LLM(kv_cache_dtype="fp8")` stores K and V in',
            "fp8: fewer bytes of every token. Either works without the other.",
        ),
        "",
    ]
    if not record:
        return [*lines, _NOT_YET.format(command="fp8", file="fp8_ablation.json")]
    lines += [
        f"Measured {record['measured']}.",
        "",
        "| weights | KV cache | bytes of weights | bytes a token | perplexity | dNLL |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        cells = f"{row['weights_bytes']:,} | {row['kv_bytes_per_token']:,} | {row['ppl']:.3f} | {_dnll(row)}"
        lines.append(f"| {row['weights']} | {row['kv_cache']} | {cells} |")
    return [*lines, "", f"{_where(record['provenance'])}."]


def _paragraph(*lines: str) -> str:
    return fill(" ".join(lines), 118, break_long_words=False, break_on_hyphens=False)


def _dnll(row: dict[str, Any]) -> str:
    return f"{row['dnll']:.4f} ± {row['dnll_se']:.4f}"


def _where(source: dict[str, Any]) -> str:
    device = source["gpu"] or f"a CPU ({source['cpu']})"
    return f"{device}, torch {source['torch']}, commit {source['commit']}, {source['date']}"


if __name__ == "__main__":
    PAGE.write_text(page())
