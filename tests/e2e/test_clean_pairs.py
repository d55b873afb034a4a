"""Pairs of right runs that differ in everything an engine may choose: no finding, and nearly every site compared."""

import concurrent.futures
import threading

import pytest

from assay_cli import describe, diff, reference

TEXTS = [
    "In the beginning God created the heaven and the earth. And the earth was without form, and void",
    "The LORD is my shepherd; I shall not want.",
    "And it came to pass after these things, that God did tempt Abraham, and said unto him, Abraham",
    "Vanity of vanities, saith the Preacher, vanity of vanities; all is vanity.",
    "Now the sons of Issachar were, Tola, and Puah, Jashub, and Shimron, four.",
    "Blessed are the meek: for they shall inherit the earth.",
]
# Requests of a run: one, two unlike, three of which two are equal, two that begin alike, four.
PROMPTS = [
    [TEXTS[0]],
    [TEXTS[1], TEXTS[3]],
    [TEXTS[2], TEXTS[2], TEXTS[5]],
    [TEXTS[4] + " Of whom", TEXTS[4] + " And these"],
    [TEXTS[1], TEXTS[5], TEXTS[3], TEXTS[0]],
]
VARIANTS = {
    "plain": [],
    "absorbed": ["--path", "absorbed"],
    "chunk 8": ["--chunk", "8"],
    "chunk 5 absorbed": ["--chunk", "5", "--path", "absorbed"],
    "2 shards": ["--shards", "2"],
    "4 shards absorbed": ["--shards", "4", "--path", "absorbed"],
    "blocks of 4": ["--block-size", "4"],
    "sequential": ["--sequential"],
    "prefix cache": ["--prefix-cache", "--block-size", "4"],
    "2 threads": ["--threads", "2"],
    "16 tokens a step": ["--max-batch-tokens", "16"],
    "bf16": ["--dtype", "bf16"],
    "bf16 absorbed": ["--dtype", "bf16", "--path", "absorbed"],
    "bf16 2 shards": ["--dtype", "bf16", "--shards", "2"],
    "bf16 chunk 8": ["--dtype", "bf16", "--chunk", "8"],
    "f64": ["--dtype", "f64"],
    "bf16 cache": ["--kv-dtype", "bf16"],
    "fp8 cache": ["--kv-dtype", "fp8"],
    "fp8 cache absorbed": ["--kv-dtype", "fp8", "--path", "absorbed"],
}
AGAINST_PLAIN = [("plain", other) for other in VARIANTS if other != "plain"]
OTHERS = [
    ("absorbed", "bf16"),
    ("bf16", "bf16 absorbed"),
    ("fp8 cache", "fp8 cache absorbed"),
    ("f64", "bf16 chunk 8"),
    ("2 shards", "4 shards absorbed"),
    ("chunk 8", "chunk 5 absorbed"),
    ("bf16", "fp8 cache"),
]
CASES = {f"{k}: {a} - {b}": (k, a, b) for k in range(len(PROMPTS)) for a, b in AGAINST_PLAIN + OTHERS}


RUNS = threading.Lock()
_traces = {}


def trace_of(folder, k, variant):
    """The trace of a variant with prompt set k; each is run once, by whoever asks first."""
    with RUNS:
        mine = (k, variant) not in _traces
        future = _traces.setdefault((k, variant), concurrent.futures.Future())
    if mine:
        try:
            path = folder.parent / f"{k} {variant}"
            reference(path, PROMPTS[k], "--max-tokens", "12", "--ignore-eos", *VARIANTS[variant])
            future.set_result(path)
        except BaseException as error:
            future.set_exception(error)
    return future.result()


def run_case(name, folder):
    k, a, b = CASES[name]
    return diff(trace_of(folder, k, a), trace_of(folder, k, b))


def test_there_are_at_least_100_pairs():
    assert len(CASES) >= 100


@pytest.mark.parametrize("name", CASES)
def test_two_right_runs_give_no_finding(name, outcomes):
    result = outcomes[name]()
    assert result["verdict"] in ("same", "noise"), describe(result)
    assert result["findings"] == []
    coverage = result["coverage"]
    assert coverage["share"] >= 0.95, coverage
    assert coverage["rows_compared"] > coverage["rows_set_aside"]


def test_a_run_is_the_same_as_itself_run_again(tmp_path):
    for name in ("once", "again"):
        reference(tmp_path / name, PROMPTS[1], "--max-tokens", "6", "--ignore-eos")
    result = diff(tmp_path / "once", tmp_path / "again")
    assert result["verdict"] == "same", describe(result)


def test_other_prompts_are_incomparable(tmp_path):
    for k in (0, 1):
        reference(tmp_path / str(k), PROMPTS[k], "--max-tokens", "2", "--ignore-eos")
    assert diff(tmp_path / "0", tmp_path / "1")["verdict"] == "incomparable"
