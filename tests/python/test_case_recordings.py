"""The case generators through the package: what is read back is what was recorded."""

import json
import sys
from pathlib import Path

import assay
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cases.generators import __main__ as generate
from cases.generators import registry, writer


@pytest.mark.parametrize("identifier", sorted(registry.cases()))
def test_a_case_is_read_back_bit_by_bit(identifier, tmp_path):
    with writer.Writer(tmp_path) as rec:
        registry.generate(identifier, recording=rec)
    events = list(assay.open(tmp_path / "trace"))
    assert [e.site for e in events] == [o.site for o in rec.observations]
    for event, seen in zip(events, rec.observations):
        assert event.numpy().tobytes() == seen.array.tobytes(), seen.site
        assert tuple(event.shape) == seen.array.shape and event.rank == seen.rank
        assert event.phase == seen.phase and event.in_graph == seen.in_graph and event.stream == seen.stream
        assert {k: event.meta[k] for k in seen.meta} == seen.meta
        if seen.array.size:
            width = seen.array.itemsize
            assert tuple(event.strides) == seen.strides
            assert event.base_address + event.storage_offset * width == seen.address
        if seen.shard:
            assert (event.shard_index, event.shard_count) == (seen.shard.index, seen.shard.count)
    for name, data in rec.files.items():
        assert (tmp_path / "checkpoint" / name).read_bytes() == data


def test_opaque_names_tell_nothing(tmp_path):
    out = tmp_path / "all"
    assert (
        generate.main(["--out", str(out), "--case", "B014", "--case", "B064", "--controls", "1", "--shuffle", "3"]) == 0
    )
    index = json.loads((tmp_path / "all.index.json").read_text())["recordings"]
    assert sorted(p.name for p in out.iterdir()) == [f"{n:04d}" for n in range(len(index))]
    assert {e["case"] for e in index} >= {"B014", "B064", "bfloat16"}
    order = [e["case"] + e["twin"] for e in sorted(index, key=lambda e: e["folder"])]
    assert order != sorted(order)
    for entry in index:
        assert (out / entry["folder"] / "trace").is_dir()
        assert (out / entry["folder"] / "checkpoint").is_dir() == entry["checkpoint"]


def test_controls_are_no_fault_to_diff(tmp_path):
    generate.main(["--out", str(tmp_path), "--case", "B014", "--controls", "1"])
    index = json.loads((tmp_path / "index.json").read_text())["recordings"]
    folder = {(e["case"], e["twin"]): tmp_path / e["folder"] / "trace" for e in index}
    for name in registry.controls():
        result = assay.diff(folder[name, "a"], folder[name, "b"])
        assert result.first_bad is None and result.verdict in ("same", "noise"), name
    assert assay.diff(folder["B014", "clean"], folder["B014", "faulty"]).first_bad.name == "layers.0.attn.chunk.0.lse"
