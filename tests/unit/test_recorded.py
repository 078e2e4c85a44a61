"""Recorded results say where they come from, and what was not measured says that."""

from labkit.experiments.kernel_steps import measured_steps
from labkit.experiments.recorded import captioned, provenance_line, recorded, results


def test_a_table_of_recorded_rows_names_device_and_commit():
    table = recorded("h200/kernels.json", {"system": "step", "us": "µs"}, op="step", batch="8x4096", heads=[32, 8, 128])
    assert list(table.columns) == ["step", "µs"]
    assert list(table.step) == ["gather", "online_softmax", "gqa_packing", "split_kv", "shipped"]
    assert "H200" in table.attrs["caption"] and "recorded" in table.attrs["caption"]
    assert "H200" in captioned(table).to_html()


def test_what_nobody_measured_is_empty_and_says_so():
    table = recorded("h200/no_such_file.json", {"a": "b"})
    assert table.empty
    assert table.attrs["caption"] == "not measured yet: data/results/h200/no_such_file.json"
    assert "None" in provenance_line("h200/no_such_file.json")


def test_heads_are_shown_without_brackets():
    table = recorded("h200/kernels.json", {"heads": "heads"}, op="step", heads=[32, 8, 128])
    assert set(table.heads) == {"32, 8, 128"}


def test_steps_measured_here_are_a_table_with_gpu_and_versions_below():
    result = results("h200/kernels.json")
    table = measured_steps(result)
    first = table[(table.batch == "8x4096") & (table["heads: Q, KV, size"] == "32, 8, 128")].set_index("step")
    assert first["× as fast as gather"].gather == 1 and first["× as fast as gather"].shipped > 5
    share = first["K and V, GB/s"] / result["ceiling_gbps"] * 100
    assert abs(share - first["% of the read ceiling"]).max() < 1e-9
    caption = table.attrs["caption"].removesuffix(" GB/s")
    assert caption.startswith("measured here on NVIDIA H200, driver ") and "Triton" in caption and "/" not in caption
