"""Groups: what the one built-in call records must be what the long way records."""

import assay
import pytest
import torch
from assay import Run
from assay.attach.groups import MAX_LEARNED, Group
from assay.attach.rows import Rows
from assay.attach.session import Session
from two_ways import check_segments

RUNS = [Run(7, 0, 2, 62), Run(2**63 + 9, 2, 1, 5)]


def rows_of(step, runs=RUNS):
    return Rows(runs, step=step, phase="decode")


def found(q, kv):
    """What a probe of attention makes of a query of four heads and of both latents in one tensor."""
    heads = q.view(q.shape[0], 4, -1)
    yield "attn.q_nope", 2, heads[..., :24], {}
    yield "attn.q_pe", 2, heads[..., 24:], {"shard_index": 1, "shard_count": 2, "shard_col_offset": 32, "shard_full_cols": 64}
    yield "layers.2.attn.kv_c_normed", 2, kv[:, :40], {"engine_name": "m.kv", "meta": {"kv_scale": 0.5}}
    yield "attn.k_pe", 2, kv[:, 40:].view(kv.shape[0], 1, -1), {"compute_dtype": torch.bfloat16}


def long_way(session, rows, tensors, recorded):
    for name, layer, tensor, fields in recorded:
        assert session.record(name, tensor, layer=layer, rows=rows, **fields)


def tensors(seed, n=3, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(n, 128).to(dtype), torch.randn(n, 3, 48).to(dtype)[:, 1]  # rows of the second lie apart


def events(session):
    assert not session._failures
    session.finish()
    return list(assay.open(session.folder))


def check_like(got, expected, one_row=False):
    """one_row: its stride leads nowhere, and torch gives views of one row any; a group's is that of the tensor."""
    fields = "engine_name axes row_axis head_axis base_address shard_index shard_count shard_col_offset shard_full_cols".split()
    for field in (*fields, "site", "shape", "dtype", "compute_dtype", "storage_offset", "step", "phase", "meta"):
        assert getattr(got, field) == getattr(expected, field), (got.site, field)
    assert got.strides[one_row:] == expected.strides[one_row:]
    check_segments(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ViewsAreRecordedAsByTheLongWay(session, dtype):
    group = Group(session)
    first, second = tensors(1, dtype=dtype), tensors(2, dtype=dtype)
    assert not group.record(rows_of(0), first)  # nothing is learned
    long_way(session, rows_of(0), first, found(*first))
    group.learn(rows_of(0), first, list(found(*first)))
    assert group.record(rows_of(1), second)
    long_way(session, rows_of(1), second, found(*second))
    recorded = events(session)
    assert len(recorded) == 12
    for got, expected in zip(recorded[4:8], recorded[8:]):
        check_like(got, expected)


def test_OtherNumbersOfRowsNeedNoLearning(session):
    group, first, one = Group(session), tensors(1), tensors(2, n=1)
    long_way(session, rows_of(0), first, found(*first))
    group.learn(rows_of(0), first, list(found(*first)))
    runs = [Run(7, 0, 1, 64)]
    assert group.record(rows_of(1, runs), one)
    long_way(session, rows_of(1, runs), one, found(*one))
    recorded = events(session)
    for got, expected in zip(recorded[4:8], recorded[8:]):
        check_like(got, expected, one_row=True)


def test_TensorsThatLookOtherwiseAreLeftToTheLongWay(session):
    group, known = Group(session), tensors(1)
    long_way(session, rows_of(0), known, found(*known))
    group.learn(rows_of(0), known, list(found(*known)))
    q, kv = known
    others = [
        (q,),
        (q, kv, kv),
        (q.bfloat16(), kv),
        (torch.randn(3, 256)[:, ::2], kv),
        (q.view(3, 4, 32), kv),
        (torch.randn(3, 129)[:, 1:].contiguous()[:2], kv[:2]),  # fewer rows than the step has
        (torch.nn.Parameter(q), kv),
        (q, "no tensor"),
        (torch.complex(q, q).conj().imag, kv),
    ]
    for tensors_ in others:
        assert not group.record(rows_of(1), tensors_)
    assert len(events(session)) == 4  # of the long way


def test_WhatIsNoViewOfTheTensorsIsNotLearned(session):
    q, kv = tensors(1)
    rows = rows_of(0)
    for recorded in (
        [],
        [("attn.q", 0, q.clone(), {})],
        [("attn.q", 0, q.t(), {})],
        [("attn.q", 0, q[:2], {})],
        [("attn.q", 0, q[1:], {})],
        [("attn.q", 0, q, {"flags": 1})],
        [("attn.q", 0, q, {}), ("attn.k", 0, kv.float() + 1, {})],
    ):
        group = Group(session)
        for name, layer, tensor, fields in recorded:
            session.record(name, tensor, layer=layer, rows=rows, **fields)
        group.learn(rows, (q, kv), recorded)
        assert not group.record(rows, (q, kv)), recorded


def test_DisarmedRecordsNothingAndArmedGoesOn(session):
    group, given = Group(session), tensors(1)
    long_way(session, rows_of(0), given, found(*given))
    group.learn(rows_of(0), given, list(found(*given)))
    session.trace().arm(False)
    assert group.record(rows_of(1), given)
    session.trace().arm(True)
    assert group.record(rows_of(2), given)
    assert [e.step for e in events(session)] == [0] * 4 + [2] * 4


def test_ATensorThatChangesAllTheTimeIsLearnedSoManyTimesAlone(session):
    group = Group(session)
    for width in range(8, 8 + 2 * MAX_LEARNED):
        x = torch.randn(3, width)
        assert not group.record(rows_of(width), (x,))
        session.record("attn.q_a", x, layer=0, rows=rows_of(width))
        group.learn(rows_of(width), (x,), [("attn.q_a", 0, x, {})])
    assert len(group._kept) == MAX_LEARNED
    assert len(events(session)) == 2 * MAX_LEARNED


def test_AnotherTraceIsNotGivenWhatWasLearnedInTheFirst(session):
    group, given = Group(session), tensors(1)
    long_way(session, rows_of(0), given, found(*given))
    group.learn(rows_of(0), given, list(found(*given)))
    session.finish()
    session._after_fork()  # as in a child, which opens a recording of its own
    assert not group.record(rows_of(1), given)


def test_NamesThatTheSettingsLeaveOutAreAskedForOnce(tmp_path, monkeypatch):
    monkeypatch.setenv("ASSAY", "mla")
    monkeypatch.setenv("ASSAY_DIR", str(tmp_path / "trace"))
    session = Session()
    trace = session.trace()
    trace.arm(False)
    assert trace.lets_through("layers.0.attn.q") and not trace.lets_through("logits")
    assert not session.observed("layers.0.attn.q") and not session.observed("logits")
    trace.arm(True)
    assert session.observed("layers.0.attn.q") and not session.observed("logits")
    session.finish()


def test_MembersThatLayInOneStorageAreReadWhereTheyAre(session):
    """How far two members lie apart depends on the number of rows, and later ones need not share a storage."""
    group = Group(session)
    first = torch.randn(2, 3, 64).unbind(0)
    recorded = [("input_norm", 0, first[0], {}), ("post_norm", 0, first[1], {})]
    long_way(session, rows_of(0), first, recorded)
    group.learn(rows_of(0), first, recorded)
    apart = torch.full((3, 64), 1.0), torch.full((3, 64), 2.0)
    assert group.record(rows_of(1), apart)
    by_site = {event.site: event.segments for event in events(session) if event.step == 1}
    assert {(s.min, s.max) for s in by_site["layers.0.input_norm"]} == {(1.0, 1.0)}
    assert {(s.min, s.max) for s in by_site["layers.0.post_norm"]} == {(2.0, 2.0)}


def test_ViewAcrossRowsOfItsMemberIsNotLearned(session):
    group = Group(session)
    whole = torch.randn(3, 8, 16)
    group.learn(rows_of(0), [whole[:, :2]], [("attn.q_nope", 0, whole[:, 4:6], {})])  # behind the member's own row
    assert not group.record(rows_of(1), [whole[:, :2]])


def cache_and_rows(seed, n=3, slots=(7, 0, 12), dtype=torch.bfloat16):
    """A cache of 4 blocks of 4 rows, the rows' numbers, and a copy of them."""
    torch.manual_seed(seed)
    cache, numbers = torch.randn(4, 4, 24).to(dtype), torch.tensor(slots)
    return cache, numbers, cache.view(-1, 24)[numbers[:n].clamp(0, 15)]


@pytest.mark.parametrize("slots", [(7, 0, 12), (15, 15, 0, -1)])
def test_RowsOfACacheAreRecordedByTheirNumbers(session, slots):
    group, found = Group(session), lambda written: [("attn.kv_write", 1, written, {"meta": {"kv_scale": 1.0}})]
    for step in range(2):
        cache, numbers, written = cache_and_rows(step, slots=slots)
        if step == 0:
            long_way(session, rows_of(0), (written,), found(written))
            group.learn(rows_of(0), (written,), found(written), (cache, numbers))
            assert group.by_row
        else:
            assert group.record(rows_of(1), (cache, numbers))
            long_way(session, rows_of(1), (written,), found(written))
    recorded = events(session)
    assert len(recorded) == 3 and recorded[1].shape == (3, 24)
    check_segments(recorded[1], recorded[2])
    for field in ("site", "shape", "strides", "dtype", "step", "phase", "meta", "storage_offset"):
        assert getattr(recorded[1], field) == getattr(recorded[2], field), field


def test_NumbersOfRowsThatAreNoneAndOtherCachesAreLeftToTheLongWay(session):
    group = Group(session)
    cache, numbers, written = cache_and_rows(0)
    found = [("attn.kv_write", 1, written, {})]
    long_way(session, rows_of(0), (written,), found)
    group.learn(rows_of(0), (written,), found, (cache, numbers))
    for whole, rows in (
        (cache, torch.tensor([7, -1, 2])),
        (cache, torch.tensor([7, 16, 2])),
        (cache, torch.tensor([7, 2**62, 2])),
        (cache, torch.tensor([7, 2])),
        (cache, torch.tensor([[7, 2, 3]])),
        (cache, torch.tensor([7, 0, 2, 0])[::2]),
        (cache, numbers.int()),
        (cache[:3], numbers),
        (cache.transpose(0, 1), numbers),
        (cache.float(), numbers),
        (cache, None),
    ):
        assert not group.record(rows_of(1), (whole, rows)), rows
    assert not group.record(rows_of(1), (written,))
    assert len(events(session)) == 1


def test_ACacheOfAnotherTypeIsNotTakenByRow(session):
    cache, numbers, written = cache_and_rows(0, dtype=torch.float32)
    group, found = Group(session), [("attn.kv_write", 1, written, {})]
    long_way(session, rows_of(0), (written,), found)
    group.learn(rows_of(0), (written,), found, (cache, numbers))
    assert not group.by_row and group.record(rows_of(1), (written,))
    assert len(events(session)) == 2


def test_MovedRowsAreThoseOfTheLaterStep(session):
    first = Rows([Run(7, 0, 2, 62), Run(2**63 + 9, 2, 1, 5), Run(0, 3, 2, 0, True)], step=4, phase="decode")
    moved = first.moved([64, 6, 0], 5)
    later = moved.moved([66, 7, 0], 6)
    assert first.runs[0].first_position == 62 and first.step == 4
    assert moved.runs == (Run(7, 0, 2, 64), Run(2**63 + 9, 2, 1, 6), Run(0, 3, 2, 0, True))
    group, x = Group(session), torch.randn(5, 8)
    session.record("attn.q_a", x, layer=0, rows=first)
    group.learn(first, (x,), [("attn.q_a", 0, x, {})])
    del first, moved  # what they had addresses of is gone
    assert group.record(later, (x,))
    same = Rows([Run(7, 0, 2, 66), Run(2**63 + 9, 2, 1, 7), Run(0, 3, 2, 0, True)], step=6, phase="decode")
    session.record("attn.q_a", x, layer=0, rows=same)
    got, expected = events(session)[1:]
    check_like(got, expected)
    assert (later.n_rows, later.runs) == (same.n_rows, same.runs)


def test_AGroupIsAskedBeforeTheTraceIsOpen(session):
    group = Group(session)
    assert session._trace is None and not group.record(rows_of(0), [torch.randn(3, 8) for _ in range(3)])
