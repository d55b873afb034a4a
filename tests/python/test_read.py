"""Reading traces: events, the Arrow table in the real consumers, and the comparison."""

import gc
import struct

import assay
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest


@pytest.fixture
def recorded(trace_dir):
    """Three steps of two sites, one of them over two requests: 3 * (2 + 1) segments."""
    rng = np.random.default_rng(3)
    with assay.trace(trace_dir) as t:
        for step in range(3):
            runs = [assay.Run(11, 0, 2, step), assay.Run(22, 2, 2, step)]
            t.record("layers.0.out", rng.normal(size=(4, 8)), step=step, runs=runs)
            t.record("layers.0.mlp.down.weight", rng.normal(size=(8, 8)), step=step)
    return trace_dir


def expected_rows(events):
    return [(e.site, e.step, s.request, s.sum_sq) for e in events for s in e.segments]


def test_events_are_a_sequence(recorded):
    events = assay.open(recorded)
    assert len(events) == 6
    assert events[-1].step == 2
    assert [e.number for e in events[1:3]] == [1, 2]
    assert [e.sequence for e in events] == sorted(e.sequence for e in events)
    assert events.sites == ("layers.0.out", "layers.0.mlp.down.weight")
    with pytest.raises(IndexError):
        events[6]


def test_pyarrow_reads_every_segment(recorded):
    events = assay.open(recorded)
    table = pa.table(events)
    rows = zip(*(table.column(c).to_pylist() for c in ("site", "step", "request", "sum_sq")))
    assert list(rows) == expected_rows(events)


def test_table_outlives_events_and_reader(recorded):
    table = pa.table(assay.open(recorded))
    gc.collect()
    assert table.num_rows == 9
    table.validate(full=True)


def test_unread_capsule_is_released(recorded):
    events = assay.open(recorded)
    from assay import _events

    capsule = events.__arrow_c_stream__()
    assert len(_events._streams) == 1
    del capsule
    gc.collect()
    assert len(_events._streams) == 0


def test_polars_reads_the_trace(recorded):
    events = assay.open(recorded)
    frame = pl.DataFrame(events)
    assert frame.select("site", "step", "request", "sum_sq").rows() == expected_rows(events)


def test_pandas_reads_the_trace(recorded):
    events = assay.open(recorded)
    frame = pd.DataFrame.from_arrow(events)
    columns = frame[["site", "step", "request", "sum_sq"]]
    assert list(columns.itertuples(index=False, name=None)) == expected_rows(events)


def test_duckdb_queries_the_trace(recorded):
    events = pa.table(assay.open(recorded))
    got = duckdb.sql("select site, count(*), sum(n_rows) from events group by site order by site").fetchall()
    assert got == [("layers.0.mlp.down.weight", 3, 0), ("layers.0.out", 6, 12)]


def event_records(data):
    """(offset, size) of each committed event record of a trace file, by the frame in docs/trace-format.md."""
    header_bytes, committed, event_kind = 4096, 0x9E57A55A, 3
    found, at = [], header_bytes
    while at + 16 <= len(data):
        tag, size, _, kind = struct.unpack_from("<IIIH", data, at)
        if tag != committed:
            at += 8
            continue
        if kind == event_kind:
            found.append((at, size))
        at += size
    return found


def test_missing_trace_is_bad_input(tmp_path):
    with pytest.raises(assay.BadInputError):
        assay.open(tmp_path / "nothing")


def test_damaged_event_is_lost_alone_and_named(recorded):
    before = [(e.site, e.step) for e in assay.open(recorded)]
    file = next(recorded.glob("*.assay"))
    data = bytearray(file.read_bytes())
    records = event_records(data)
    assert len(records) == len(before) == 6
    offset, size = records[3]
    data[offset + size // 2] ^= 0xFF
    file.write_bytes(data)
    events = assay.open(recorded)
    assert [(e.site, e.step) for e in events] == before[:3] + before[4:]
    (damage,) = [d for d in events.damages if not d.benign]
    assert damage.file.endswith(file.name) and damage.offset == offset


def test_payload_is_read_only_and_keeps_its_trace(trace_dir):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with assay.trace(trace_dir, level="payload") as t:
        t.record("x", values)
    payload = assay.open(trace_dir)[0].payload()
    gc.collect()
    assert bytes(payload) == values.tobytes()
    assert payload.readonly


def test_sampled_rows_come_back_as_rows(trace_dir):
    values = np.arange(400, dtype=np.float32).reshape(100, 4)
    with assay.trace(trace_dir, level="sample:5") as t:
        t.record("layers.0.out", values)
    event = assay.open(trace_dir)[0]
    assert len(event.payload_rows) == 5
    np.testing.assert_array_equal(event.numpy(), values[list(event.payload_rows)])


def run_layer(path, *, fault=False, requests=(1, 2), **knobs):
    """A tiny residual layer over 6 tokens: input_norm -> attn.out -> attn.o_proj -> out."""
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(6, 32)), rng.normal(size=(32, 32)) / 6
    with assay.trace(path, **knobs) as t:
        where = {"step": 0, "runs": [assay.Run(requests[0], 0, 3, 0), assay.Run(requests[1], 3, 3, 0)]}
        t.record("embed", x, **where)
        normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)
        t.record("layers.0.input_norm", normed, **where)
        t.record("layers.0.attn.q_proj", (normed @ w * (1.5 if fault else 1)).reshape(6, 4, 8), **where)


def test_diff_of_equal_runs_is_the_same(tmp_path):
    run_layer(tmp_path / "a")
    run_layer(tmp_path / "b")
    result = assay.diff(tmp_path / "a", tmp_path / "b")
    assert (result.verdict, result.exit_code, result.first_bad) == ("same", 0, None)
    assert result.coverage.share == 1.0
    assert result.coverage.sites_compared == 3


def test_diff_names_the_first_wrong_tensor(tmp_path):
    run_layer(tmp_path / "a")
    run_layer(tmp_path / "b", fault=True)
    result = assay.diff(assay.open(tmp_path / "a"), tmp_path / "b")
    assert (result.verdict, result.exit_code) == ("fault", 1)
    bad = result.first_bad
    assert bad is not None and bad.name == "layers.0.attn.q_proj"
    assert bad.layer == 0 and bad.measured > bad.bound > 0
    assert result.raw["schema"] == "assay.diff/1"


def test_diff_of_strangers_is_incomparable(tmp_path):
    run_layer(tmp_path / "a")
    run_layer(tmp_path / "b", requests=(3, 4))
    result = assay.diff(tmp_path / "a", tmp_path / "b")
    assert (result.verdict, result.exit_code) == ("incomparable", 3)
    with pytest.raises(assay.UsageError):
        assay.diff(tmp_path / "a", tmp_path / "a", tolerance="not a number")
