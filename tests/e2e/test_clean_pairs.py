"""Pairs of right runs that differ in everything an engine may choose: no finding, and nearly every site compared."""

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
PAIRS = [(k, a, b) for k in range(len(PROMPTS)) for a, b in AGAINST_PLAIN + OTHERS]


@pytest.fixture(scope="session")
def traces(tmp_path_factory):
    """Runs each variant once a prompt set, when it is first asked for."""
    folder = tmp_path_factory.mktemp("traces")

    def trace(k, variant):
        path = folder / f"{k} {variant}"
        if not path.exists():
            reference(path, PROMPTS[k], "--max-tokens", "12", "--ignore-eos", *VARIANTS[variant])
        return path

    return trace


def test_there_are_at_least_100_pairs():
    assert len(PAIRS) >= 100


@pytest.mark.parametrize("k,a,b", PAIRS, ids=[f"{k}: {a} - {b}" for k, a, b in PAIRS])
def test_two_right_runs_give_no_finding(k, a, b, traces):
    result = diff(traces(k, a), traces(k, b))
    assert result["verdict"] in ("same", "noise"), describe(result)
    assert result["findings"] == []
    coverage = result["coverage"]
    assert coverage["share"] >= 0.95, coverage
    assert coverage["rows_compared"] > coverage["rows_set_aside"]


def test_a_run_is_the_same_as_itself_run_again(traces, tmp_path):
    reference(tmp_path / "again", PROMPTS[0], "--max-tokens", "12", "--ignore-eos")
    result = diff(traces(0, "plain"), tmp_path / "again")
    assert result["verdict"] == "same", describe(result)


def test_other_prompts_are_incomparable(traces):
    assert diff(traces(0, "plain"), traces(1, "plain"))["verdict"] == "incomparable"
