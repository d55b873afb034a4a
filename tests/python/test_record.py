"""What record() writes, against torch and NumPy computing the same in float64."""

import array
import ctypes
import os
import subprocess
import sys

import assay
import ml_dtypes
import numpy as np
import pytest
import torch

ROWS, HEADS, DIM = 5, 2, 8


def only_event(path):
    events = assay.open(path)
    assert len(events) == 1
    return events[0]


def check_statistics(event, expected):
    """expected: the tensor in float64. Sums: n units in the last place of Σ|x|; f32: eleven float roundings too."""
    segment = event.segments[0]
    finite = expected[np.isfinite(expected)]
    assert segment.count == expected.size
    assert segment.nan == np.isnan(expected).sum()
    assert segment.pos_inf == np.isposinf(expected).sum()
    assert segment.neg_inf == np.isneginf(expected).sum()
    assert segment.zero == (expected == 0).sum()
    assert segment.min == finite.min() and segment.max == finite.max()
    assert segment.abs_max == np.abs(finite).max()
    slack = finite.size * 2.0**-52 + (11 * 2.0**-24 if event.dtype == "f32" else 0)
    assert abs(segment.sum - finite.sum()) <= slack * np.abs(finite).sum()
    assert abs(segment.sum_sq - (finite**2).sum()) <= slack * (finite**2).sum()


TORCH_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8_e4m3fn": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
    "f8_e4m3fnuz": torch.float8_e4m3fnuz,
    "f8_e5m2fnuz": torch.float8_e5m2fnuz,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_dtypes_are_measured_exactly(trace_dir, name):
    torch.manual_seed(1)
    tensor = (torch.randn(ROWS, DIM) * 3).to(TORCH_DTYPES[name])
    with assay.trace(trace_dir) as t:
        assert t.record("layers.0.out", tensor)
    event = only_event(trace_dir)
    assert event.dtype == name
    assert event.shape == (ROWS, DIM)
    check_statistics(event, tensor.to(torch.float64).numpy())


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_ml_dtypes_arrays_are_measured_exactly(trace_dir, name):
    values = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype(getattr(ml_dtypes, name))
    with assay.trace(trace_dir) as t:
        t.record("layers.0.out", values)
    check_statistics(only_event(trace_dir), values.astype(np.float64))


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "int64", "uint16", "uint64", "bool"])
def test_numpy_dtypes_are_measured_exactly(trace_dir, name):
    values = (np.random.default_rng(1).random((ROWS, DIM)) * 3).astype(name)
    with assay.trace(trace_dir) as t:
        t.record("layers.0.out", values)
    check_statistics(only_event(trace_dir), values.astype(np.float64))


VIEWS = {
    "transposed": lambda x: x.T,
    "sliced": lambda x: x[1:, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[0], (4, x.shape[1])),
    "scalar": lambda x: x[0, 0],
    "rank0": lambda x: x[0, 0].reshape(()),
    "rank4": lambda x: x.reshape(ROWS, 2, 2, 2).transpose(3, 0, 2, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_numpy_views_are_read_through_their_strides(trace_dir, view):
    base = np.random.default_rng(2).normal(size=(ROWS, DIM)).astype(np.float32)
    values = VIEWS[view](base)
    with assay.trace(trace_dir, level="payload") as t:
        t.record("x", values)
    event = only_event(trace_dir)
    assert event.shape == np.shape(values)
    check_statistics(event, np.asarray(values, np.float64))
    np.testing.assert_array_equal(event.numpy(), np.asarray(values))


def test_torch_views_keep_strides_offset_and_storage(trace_dir):
    base = torch.randn(10, DIM, requires_grad=True)
    view = base[2:7, 1::2].transpose(0, 1)
    with assay.trace(trace_dir, level="payload") as t:
        t.record("x", view)
    event = only_event(trace_dir)
    assert event.strides == (2, DIM)
    assert event.storage_offset == 2 * DIM + 1
    assert event.base_address == base.untyped_storage().data_ptr()
    np.testing.assert_array_equal(event.numpy(), view.detach().numpy())
    assert base.grad is None


def test_torch_negated_view_is_read_with_its_sign(trace_dir):
    values = torch.view_as_complex(torch.randn(4, 2)).conj().imag
    assert values.is_neg()
    with assay.trace(trace_dir) as t:
        t.record("x", values)
    check_statistics(only_event(trace_dir), values.resolve_neg().double().numpy())


def test_packed_float4_counts_elements(trace_dir):
    packed = torch.tensor([[0x21, 0x43], [0x65, 0x87]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with assay.trace(trace_dir) as t:
        t.record("x", packed)
    event = only_event(trace_dir)
    assert (event.dtype, event.shape) == ("f4_e2m1", (2, 4))
    # codes 1 2 3 4 5 6 7 8 are 0.5 1 1.5 2 3 4 6 -0
    assert event.segments[0].sum == 18.0


def test_nonfinite_values_are_counted_and_never_summed(trace_dir):
    values = np.ones((3, DIM), np.float32)
    values[0, 0], values[1, 1], values[2, 2] = np.nan, np.inf, -np.inf
    with assay.trace(trace_dir) as t:
        t.record("layers.0.out", values)
    event = only_event(trace_dir)
    assert event.nonfinite == 3
    check_statistics(event, values.astype(np.float64))


class DlpackOnly:
    """A tensor of no known library: what JAX and CuPy look like from here."""

    def __init__(self, tensor, device=None):
        self.tensor, self.device = tensor, device

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.device or self.tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float64])
def test_dlpack_producers_are_read_without_their_library(trace_dir, dtype):
    tensor = (torch.randn(6, 10) * 2).to(dtype)[::2, 1:9].T
    with assay.trace(trace_dir) as t:
        t.record("x", DlpackOnly(tensor))
    event = only_event(trace_dir)
    assert event.shape == (8, 3)
    assert event.strides == tensor.stride()
    check_statistics(event, tensor.to(torch.float64).numpy())


def test_buffers_are_read(trace_dir):
    numbers = array.array("d", [1.5, -2.5, 0.0])
    with assay.trace(trace_dir) as t:
        t.record("a", numbers)
        t.record("b", memoryview(numbers)[::2])
        t.record("c", b"\x01\x02")
    a, b, c = assay.open(trace_dir)
    assert (a.dtype, a.shape, a.segments[0].sum) == ("f64", (3,), -1.0)
    assert (b.strides, b.segments[0].sum) == ((2,), 1.5)
    assert (c.dtype, c.segments[0].sum) == ("u8", 3)


def test_buffers_without_strides_are_gapless(trace_dir):
    """ctypes leaves the strides out of what it exports, whatever it is asked for."""
    rows = ((ctypes.c_float * 3) * 2)((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    with assay.trace(trace_dir) as t:
        t.record("a", (ctypes.c_double * 4)(1.0, 2.0, 3.0, 4.0))
        t.record("b", rows)
        t.record("c", ctypes.c_int32(7))
    a, b, c = assay.open(trace_dir)
    assert (a.dtype, a.shape, a.strides, a.segments[0].sum) == ("f64", (4,), (1,), 10.0)
    assert (b.dtype, b.shape, b.strides, b.segments[0].sum) == ("f32", (2, 3), (3, 1), 21.0)
    assert (c.dtype, c.shape, c.segments[0].sum) == ("i32", (), 7.0)


def test_dtype_reinterprets_a_stand_in_of_the_same_width(trace_dir):
    tensor = torch.randn(4, 4).to(torch.bfloat16)
    with assay.trace(trace_dir) as t:
        t.record("x", tensor.view(torch.uint16).numpy(), dtype="bf16")
        with pytest.raises(assay.UsageError, match="has 8 bits, the tensor's u16 has 16"):
            t.record("x", tensor.view(torch.uint16).numpy(), dtype="f8_e5m2")
    check_statistics(assay.open(trace_dir)[0], tensor.double().numpy())


def test_every_field_reaches_the_trace(trace_dir):
    tensor = torch.randn(ROWS, HEADS, DIM)
    with assay.trace(trace_dir, rank=2, world_size=4, meta={"model": "m"}) as t:
        key = t.request([5, 6, 7], engine_id="cmpl-1")
        t.record(
            "attn.q",
            tensor,
            layer=3,
            engine_name="model.layers.3.q",
            axes="T H d",
            step=9,
            phase="decode",
            flags=assay.BEFORE_INPLACE | assay.IN_GRAPH,
            stream=77,
            compute_dtype="bf16",
            runs=[assay.Run(key, 0, 4, 10), (0, 4, 1, 0, True)],
            shard_index=1,
            shard_count=2,
            shard_col_offset=16,
            shard_full_cols=32,
            meta={"kv_scale": 0.5},
        )
    events = assay.open(trace_dir)
    e = events[0]
    assert (e.site, e.engine_name, e.axes) == ("layers.3.attn.q", "model.layers.3.q", "T H d")
    assert (e.rank, e.step, e.phase, e.stream) == (2, 9, "decode", 77)
    assert e.before_inplace and e.in_graph and not e.anomaly_ring
    assert (e.dtype, e.compute_dtype) == ("f32", "bf16")
    assert (e.row_axis, e.head_axis) == (0, 1)
    assert (e.shard_index, e.shard_count, e.shard_col_offset, e.shard_full_cols) == (1, 2, 16, 32)
    assert e.meta == {"kv_scale": "0.5"}
    real, padding = e.segments
    assert (real.request, real.first_position, real.n_rows, real.padding) == (key, 10, 4, False)
    assert (padding.n_rows, padding.padding) == (1, True)
    np.testing.assert_allclose(real.row_l2, tensor[:4].flatten(1).norm(dim=1).numpy(), rtol=1e-6)
    np.testing.assert_allclose(real.head_l2, tensor[:4].transpose(0, 1).flatten(1).norm(dim=1).numpy(), rtol=1e-6)
    process = events.processes[0]
    assert (process.rank, process.world_size, process.closed) == (2, 4, True)
    assert process.meta["model"] == "m" and process.meta["engine"] == "python"
    request = process.requests[0]
    assert (request.key, request.prompt_tokens, request.engine_id, request.tokens) == (key, 3, "cmpl-1", ())


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, np.int32)])
def test_requests_and_positions_row_by_row(trace_dir, make):
    keys = [assay.request_key([1]), assay.request_key([2])]
    requests = np.array([keys[0], keys[0], keys[1], keys[1], 0], np.uint64)
    with assay.trace(trace_dir) as t:
        t.record("layers.0.out", np.ones((5, 4)), row_requests=requests, row_positions=make([7, 8, 0, 5, -1]))
    runs = [(s.request, s.first_position, s.n_rows, s.padding) for s in only_event(trace_dir).segments]
    assert runs == [(keys[0], 7, 2, False), (keys[1], 0, 1, False), (keys[1], 5, 1, False), (0, 0, 1, True)]


def test_one_request_for_all_rows_counts_positions(trace_dir):
    with assay.trace(trace_dir) as t:
        t.record("layers.0.out", np.ones((70, 4)), row_requests=5)
    assert [(s.first_position, s.n_rows) for s in only_event(trace_dir).segments] == [(0, 64), (64, 6)]


def test_request_keys_do_not_depend_on_how_tokens_are_held():
    expected = assay.request_key([1, 2, 3])
    assert expected != 0
    for tokens in ((1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], np.int32), torch.tensor([1, 2, 3])):
        assert assay.request_key(tokens) == expected
    assert assay.request_key([1, 2, 3], 1) != expected
    assert assay.request_key([1, 2]) != expected


def test_token_ids_are_stored_only_when_asked(trace_dir, tmp_path):
    for path, knobs, stored in ((trace_dir, {}, ()), (tmp_path / "tokens", {"tokens": True}, (1, 2, 3))):
        with assay.trace(path, **knobs) as t:
            t.request([1, 2, 3])
        assert assay.open(path).processes[0].requests[0].tokens == stored


# ---- what does not fit


def test_device_tensor_is_refused_by_name(trace_dir):
    with assay.trace(trace_dir) as t:
        with pytest.raises(assay.UsageError, match=r"on cuda:1; .* pass tensor.cpu\(\)"):
            t.record("x", DlpackOnly(torch.ones(2), device=(2, 1)))
        with pytest.raises(assay.UsageError, match="on meta"):
            t.record("x", torch.ones(2, device="meta"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2, dtype=torch.complex64), "complex64 is not a dtype"),
        (np.ones(2, np.longdouble), "is not a dtype that assay measures"),
        (np.ones(2, ">f4"), "foreign byte order"),
        (np.ones(2, ml_dtypes.float4_e2m1fn), "one element a byte"),
        ([1.0, 2.0], "list is no tensor"),
        (3.0, "float is no tensor"),
        (torch.ones(2).to_sparse(), "without memory"),
    ],
)
def test_unreadable_tensors_are_refused_in_words(trace_dir, value, words):
    with assay.trace(trace_dir) as t:
        with pytest.raises(assay.UsageError, match=words):
            t.record("x", value)


def test_misfits_raise_warn_or_count(trace_dir, tmp_path):
    with assay.trace(trace_dir) as t:
        with pytest.raises(assay.UsageError, match="axes .* do not fit a tensor of rank 1"):
            t.record("x", np.ones(2), axes="T H d")
        with pytest.raises(ValueError, match="unknown phase"):
            t.record("y", np.ones(2), phase="decoding")
    with assay.trace(tmp_path / "warn", errors="warn") as t:
        with pytest.warns(assay.AssayWarning, match="list is no tensor"):
            assert t.record("x", [1.0]) is False
    with assay.trace(tmp_path / "count", errors="count") as t:
        for _ in range(3):
            assert t.record("x", [1.0]) is False
        assert t.drops().internal == 3
    notes = assay.open(tmp_path / "count").processes[0].coverage
    assert [(n.site, n.reason, n.count) for n in notes] == [("x", "dropped", 3)]


def test_budget_drops_are_counted_and_never_raised(trace_dir):
    with assay.trace(trace_dir, level="payload", budget="payload=100") as t:
        assert t.record("a", np.zeros(10)) is True
        assert t.record("b", np.ones(10)) is False
        assert t.drops().payload_budget == 1
    assert len(assay.open(trace_dir)) == 2


# ---- settings, gates and life


def test_settings_are_parsed_by_the_one_parser():
    parsed = assay.settings(profile="mla", layers="0-3", level="sample:4", strict=True, environment=False)
    assert parsed["ASSAY"] == "mla"
    assert parsed["ASSAY_LAYERS"] == "0-3"
    assert parsed["ASSAY_STRICT"] == "on"
    assert parsed["ASSAY_INCLUDE"].startswith("layers.*.attn.*")
    assert assay.settings(include=["a", "b*"], steps=[0, 2])["ASSAY_INCLUDE"] == "a,b*"
    with pytest.raises(assay.UsageError, match="ASSAY_LAYERS, column 3"):
        assay.settings(layers="0,x")
    with pytest.raises(assay.UsageError, match="did you mean ASSAY_LEVEL"):
        assay.settings(levle="stats")


def test_environment_is_overridden_by_knobs(trace_dir, monkeypatch):
    monkeypatch.setenv("ASSAY_LEVEL", "payload")
    assert assay.settings()["ASSAY_LEVEL"] == "payload"
    assert assay.settings(level="names")["ASSAY_LEVEL"] == "names"
    assert assay.settings(environment=False)["ASSAY_LEVEL"] == "stats"


def test_without_a_path_and_assay_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with assay.trace() as t:
        assert not t.armed
        assert t.record("x", np.ones(2)) is True
        assert t.path == ""
    assert list(tmp_path.iterdir()) == []


def test_module_record_uses_the_trace_opened_last(trace_dir):
    assert assay.record("x", np.ones(2)) is True  # nothing open: nothing happens
    with assay.trace(trace_dir) as t:
        assert assay.current() is t
        assay.record("layers.0.out", np.ones((2, 2)))
        t.arm(False)
        assay.record("layers.0.out", np.ones((2, 2)))
        t.arm()
    assert assay.current() is None
    assert len(assay.open(trace_dir)) == 1


def test_environment_alone_records_a_script(tmp_path):
    script = "import assay, numpy as np\nassay.record('logits', np.ones((2, 3)), step=1)\n"
    code = "import sys; sys.path.insert(0, sys.argv[1]); exec(sys.argv[2])"
    environment = {**os.environ, "ASSAY": "all", "ASSAY_DIR": str(tmp_path / "t")}
    python = os.path.join(os.path.dirname(os.path.dirname(assay.__file__)))
    subprocess.run([sys.executable, "-c", code, python, script], env=environment, check=True)
    events = assay.open(tmp_path / "t")
    assert [e.site for e in events] == ["logits"]
    assert events.processes[0].closed


def test_forked_child_records_into_its_own_file(trace_dir):
    with assay.trace(trace_dir) as t:
        t.record("a", np.ones(2))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                t.record("b", np.ones(2))
                t.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    events = assay.open(trace_dir)
    by_pid = {p.file: p.pid for p in events.processes}
    assert {(by_pid[e.file] == child, e.site) for e in events} == {(False, "a"), (True, "b")}


def test_ring_is_written_on_a_nan(trace_dir):
    values = np.ones((2, 2))
    with assay.trace(trace_dir, ring=2) as t:
        for step in range(6):
            t.record("layers.0.out", values, step=step)
        values[0, 0] = np.nan
        t.record("layers.0.out", values, step=6)
    assert [(e.step, e.anomaly_ring) for e in assay.open(trace_dir)] == [(5, True), (6, True)]


WRONG_FIELDS = [
    {"step": 1 << 63},
    {"step": -2},
    {"step": 1.5},
    {"rank": 1 << 31},
    {"layer": -1},
    {"layer": "three"},
    {"stream": -1},
    {"flags": 1 << 32},
    {"row_axis": -7},
    {"axes": "T\0 d"},
    {"meta": {"key": "a\0b"}},
    {"meta": {1: "a"}},
    {"meta": 5},
    {"row_requests": 1 << 64, "row_positions": [0, 1]},
    {"row_requests": "ab", "row_positions": [0, 1]},
    {"row_positions": [0.5, 1.5]},
    {"row_positions": [0, 1 << 63]},
    {"row_positions": [0, -2]},
    {"row_positions": np.array([0, -2])},
    {"row_positions": np.array([0, (1 << 64) - 1], np.uint64)},
    {"row_positions": np.array([0, 1 << 63], np.uint64)},
    {"row_positions": 5},
    {"runs": [(0, 0, -1, 0)]},
    {"runs": [(0, -1, 2, 0)]},
    {"runs": [(0, 0, 2, 1 << 63)]},
    {"runs": [(0, 0, 2, 0, 0, 0)]},
    {"runs": [None]},
    {"runs": 5},
    {"shard_index": 0, "shard_count": 1 << 31},
]


@pytest.mark.parametrize("level", ["names", "stats"])
def test_runs_out_of_range_are_refused_at_every_level(trace_dir, level):
    with assay.trace(trace_dir, level=level) as t:
        with pytest.raises(assay.UsageError, match=r"runs\[0\] has first_row 0, n_rows -1"):
            t.record("attn.q", np.ones((2, 3)), row_axis=0, runs=[(0, 0, -1, 0)])


def test_rows_without_a_row_axis_are_refused_not_dropped(trace_dir):
    values = np.ones((2, 3), np.float32)
    with assay.trace(trace_dir) as t:
        with pytest.raises(assay.UsageError, match="without a row axis"):
            t.record("some.name", values, row_requests=7)
        assert t.record("some.name", values, row_requests=7, row_axis=0)
    assert only_event(trace_dir).segments[0].request == 7


def test_instruction_set_that_is_not_there_is_refused(trace_dir, monkeypatch):
    monkeypatch.setenv("ASSAY_ISA", "avx3")
    with pytest.raises(assay.UsageError, match="ASSAY_ISA=avx3 is no instruction set"):
        assay.trace(trace_dir)


@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=ascii)
def test_field_that_does_not_fit_is_refused_never_cut(trace_dir, fields):
    values = np.ones((2, 3), np.float32)
    with assay.trace(trace_dir) as t:
        with pytest.raises(assay.UsageError):
            t.record("attn.q", values, **{"row_axis": 0, **fields})
    assert len(assay.open(trace_dir)) == 0


def test_wrong_arguments_never_stop_a_host_that_counts(trace_dir):
    values = np.ones((2, 3), np.float32)
    with assay.trace(trace_dir, errors="count") as t:
        for number, fields in enumerate(WRONG_FIELDS):
            assert t.record(f"q{number}", values, **{"row_axis": 0, **fields}) is False
        for name in ("", "a\0b", "\udcff", 5, None):
            assert t.record(name, values) is False
        for tensor in (None, 5, [1.0], "text", object(), np.ones(2, np.complex64)):
            assert t.record("x", tensor) is False
        assert t.drops().internal == len(WRONG_FIELDS) + 5 + 6
        assert t.record("x", values) is True
    assert t.drops().recorded == 1  # the counts outlive the trace
    assert t.drops().internal == len(WRONG_FIELDS) + 5 + 6
    assert t.record("x", values) is False  # closed: not recorded, and says so
    events = assay.open(trace_dir)
    assert [e.site for e in events] == ["x"]


def test_path_with_a_nul_is_refused(tmp_path):
    with pytest.raises(assay.UsageError, match="NUL"):
        assay.trace(f"{tmp_path}/a\0b")
    assert list(tmp_path.iterdir()) == []
