"""Recorded results say where they come from, and what was not measured says that."""

from labkit.experiments.recorded import captioned, provenance_line, recorded


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
