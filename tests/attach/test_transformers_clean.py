"""Right runs of transformers against the native reference: nothing is named, and what both have is compared."""

import assay
import pytest
from transformers_runs import PROMPTS, Runs, covered, describe, reference, sites_of

ONE = [PROMPTS[1]]
DRAFTED = [PROMPTS[3] * 3]  # its own text is what tokens behind it are drafted from
PRECISIONS = ("float32", "bfloat16")
ATTENTIONS = ("eager", "sdpa")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("clean"))
    for dtype in PRECISIONS:
        for attention in ATTENTIONS:
            for name, prompts in (("one", ONE), ("eight", PROMPTS)):
                runs.add(f"{name}-{dtype}-{attention}", prompts=prompts, dtype=dtype, attention=attention)
    runs.add("forward", prompts=PROMPTS[:4], loop="forward")
    runs.add("uncached", prompts=PROMPTS[:4], loop="uncached")
    runs.add("static", prompts=PROMPTS[:4], options={"cache_implementation": "static"})
    runs.add("chunked", prompts=PROMPTS[1:2], options={"prefill_chunk_size": 20})
    runs.add("once", prompts=PROMPTS[:4], loop="once")
    runs.add("two-batches", batches=[PROMPTS[:2], PROMPTS[:2]])
    runs.add("drafted", prompts=DRAFTED, options={"prompt_lookup_num_tokens": 4}, tokens=8)
    runs.run()
    reference(runs.folder / "reference-drafted", DRAFTED, tokens=8)
    reference(runs.folder / "reference-one", ONE)
    reference(runs.folder / "reference-eight", PROMPTS)
    reference(runs.folder / "reference-four", PROMPTS[:4])
    return runs


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("requests", ("one", "eight"))
def test_right_run_is_noise_against_the_float32_reference(runs, requests, dtype, attention):
    result = runs.diff(f"reference-{requests}", f"{requests}-{dtype}-{attention}")
    assert result.verdict == "noise", describe(result)
    assert not result.findings
    assert result.coverage.share >= 0.9
    assert covered(runs.folder / f"reference-{requests}", runs.folder / f"{requests}-{dtype}-{attention}") == 1.0
    # Near ties set rows aside; most must be left.
    assert result.coverage.rows_set_aside < result.coverage.rows_compared / 2


@pytest.mark.parametrize("requests", ("one", "eight"))
def test_eager_and_sdpa_agree_in_bf16(runs, requests):
    result = runs.diff(f"{requests}-bfloat16-eager", f"{requests}-bfloat16-sdpa")
    assert result.verdict in ("noise", "same"), describe(result)
    assert result.coverage.share >= 0.9


def test_prompt_in_chunks_is_the_request_of_its_whole_prompt(runs):
    result = runs.diff("reference-one", "chunked")
    assert result.verdict == "noise", describe(result)
    assert result.coverage.rows_only_a == 0


def test_drafted_tokens_are_no_prompt_and_refused_ones_nobodys_choice(runs):
    result = runs.diff("reference-drafted", "drafted")
    assert result.verdict == "noise", describe(result)
    (request,) = [r for p in assay.open(runs.folder / "drafted").processes for r in p.requests]
    assert request.key == assay.request_key(DRAFTED[0])
    prompt = len(DRAFTED[0])
    seen = [s for e in assay.open(runs.folder / "drafted") if e.site == "layers.0.out" for s in e.segments]
    ends = [s.first_position + s.n_rows for s in seen]
    assert ends[0] > prompt, "the first forward has drafted tokens behind the prompt"
    assert any(s.first_position < end for s, end in zip(seen[1:], ends)), "some of them were refused"


def test_padding_on_the_right_lines_up(runs):
    result = runs.diff("reference-four", "once")
    assert result.verdict == "noise", describe(result)
    assert result.coverage.share >= 0.9
    prompt_rows = sum(len(p) for p in PROMPTS[:4])
    out = next(s for s in result.sites if s.name == "layers.3.out")
    assert out.rows == prompt_rows


@pytest.mark.parametrize("loop", ("forward", "uncached", "static"))
def test_other_loops_and_caches_line_up(runs, loop):
    result = runs.diff("reference-four", loop)
    assert result.verdict == "noise", describe(result)
    # Every prompt row of every request: the reference has logits and next_token of the last ones alone.
    assert result.coverage.rows_only_a <= 4 * 4


def test_a_cache_that_is_not_there_is_absent_and_not_missing(runs):
    notes = [n for p in assay.open(runs.folder / "uncached").processes for n in p.coverage]
    assert any(n.site == "layers.*.attn.kv_write" and n.reason == "absent on this path" for n in notes)
    assert any(n.site == "layers.*.attn.lse" and n.reason == "absent on this path" for n in notes)
    assert not any("kv_write" in s for s in sites_of(runs.folder / "uncached"))


def test_equal_prompts_are_requests_of_their_own(runs):
    events = assay.open(runs.folder / "two-batches")
    keys = [r.key for p in events.processes for r in p.requests]
    assert len(keys) == len(set(keys)) == 4
    assert keys[:2] == [assay.request_key(p) for p in PROMPTS[:2]]
    assert keys[2:] == [assay.request_key(p, 1) for p in PROMPTS[:2]]


def test_rows_have_positions_and_padding(runs):
    lengths = {assay.request_key(p): len(p) for p in PROMPTS}
    widest = max(lengths.values())
    seen, padding = {}, 0
    for event in assay.open(runs.folder / "eight-float32-sdpa"):
        if event.site != "layers.2.out":
            continue
        for segment in event.segments:
            if segment.padding:
                padding += segment.n_rows
            else:
                seen.setdefault(segment.request, set()).update(
                    range(segment.first_position, segment.first_position + segment.n_rows)
                )
    assert seen == {key: set(range(n + 3)) for key, n in lengths.items()}  # 4 tokens: the last one is not fed
    assert padding == sum(widest - n for n in lengths.values())
