"""The scoreboard counts what is right, misses and false alarms, and never takes an error for a verdict."""

import json
import pathlib

from cases import scoreboard
from cases.generators import registry
from cases.scoreboard import Verdict, commands, read_verdict, score

ANSWERS = registry.expected()
FAULTS = {i: a for i, a in ANSWERS.items() if a["class"] != "noise"}


def right(answer) -> Verdict:
    constant = answer["constant"] and answer["constant"]["value"]
    return Verdict(True, answer["first_bad"], answer["class"], constant)


def finding(**first_bad) -> str:
    return json.dumps({"schema": "assay.diagnose/1", "findings": [{"first_bad": first_bad}]})


def test_right_answers_pass():
    result = score(ANSWERS, {i: right(a) for i, a in FAULTS.items()}, {"x": Verdict()})
    assert result["passed"] and set(result["reached"].values()) == {1.0} and result["false_alarms"] == []
    assert scoreboard.table(result).count("missed") == 0


def test_checkpoint_name_is_as_right_as_the_canonical_one():
    answer = ANSWERS["B064"]
    assert scoreboard.same_name(answer["checkpoint_name"], answer)
    assert not scoreboard.same_name("layers.1.mlp.down_proj.weight", answer)
    assert not scoreboard.same_name(None, ANSWERS["B057"])


def test_one_false_alarm_fails():
    result = score(ANSWERS, {i: right(a) for i, a in FAULTS.items()}, {"x": Verdict(True, "layers.0.attn.q", "SCALE")})
    assert not result["passed"] and result["false_alarms"][0]["recording"] == "x"


def test_missed_faults_fail_and_are_listed():
    verdicts = {i: Verdict() if i in ("B001", "B014", "B057") else right(a) for i, a in FAULTS.items()}
    result = score(ANSWERS, verdicts, {})
    assert not result["passed"] and result["reached"]["detected"] < 0.98
    assert "B014: detected, first_bad, class, constant missed" in scoreboard.table(result)


def test_constants_have_their_tolerance():
    wanted = ANSWERS["B014"]["constant"]
    assert scoreboard.same_constant(1.4427 * 1.019, wanted) and not scoreboard.same_constant(1.4427 * 1.03, wanted)
    assert not scoreboard.same_constant(None, wanted)
    assert not scoreboard.same_constant(-1.01, ANSWERS["B010"]["constant"])


def test_verdicts_are_read():
    out = finding(name="layers.0.attn.out", **{"class": "SCALE"}, constant=0.629)
    assert read_verdict(1, out) == Verdict(True, "layers.0.attn.out", "SCALE", 0.629)
    assert read_verdict(0, '{"findings": []}') == Verdict()


def test_errors_are_no_verdict():
    for code, out in (
        (3, ""),
        (1, ""),
        (1, "[]"),
        (0, finding(name="x")),
        (1, '{"findings": []}'),
        (1, '{"findings": [{}]}'),
    ):
        verdict = read_verdict(code, out)
        assert verdict.error and not verdict.found
    assert score(ANSWERS, {}, {"x": read_verdict(5, "")})["false_alarms"]


def test_each_recording_is_judged_by_the_command_that_sees_it():
    def entry(case, twin, folder, checkpoint=False):
        return {"case": case, "twin": twin, "folder": folder, "seed": 1, "checkpoint": checkpoint,
                "expected": ANSWERS.get(case)}  # fmt: skip

    index = [entry("B064", "faulty", "0", True), entry("B001", "faulty", "1"), entry("B001", "clean", "2"),
             entry("bfloat16", "a", "3"), entry("bfloat16", "b", "4"), entry("B097", "faulty", "5"),
             entry("B097", "clean", "6")]  # fmt: skip
    got = commands("assay", pathlib.Path("r"), index)
    assert ("faulty", "B064", ["assay", "weights", "--json", "r/0/checkpoint", "--trace", "r/0/trace"]) in got
    assert ("faulty", "B001", ["assay", "diagnose", "--json", "r/1/trace"]) in got
    assert sum(kind == "faulty" for kind, _, _ in got) == 2
    assert ("clean", "bfloat16 seed 1 as a pair", ["assay", "diagnose", "--json", "r/3/trace", "r/4/trace"]) in got
    assert ("clean", "B097 seed 1 as a pair", ["assay", "diagnose", "--json", "r/6/trace", "r/5/trace"]) in got
