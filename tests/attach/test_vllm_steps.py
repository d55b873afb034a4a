"""Rows of vLLM's steps, by a runner that has what the profile reads of vLLM's."""

import types

import numpy as np
import pytest
from assay.attach.profiles.vllm_steps import Steps


class Runner:
    """Requests in the order of their rows: id -> (tokens of the prompt, computed)."""

    def __init__(self, session):
        self.session, self.steps = session, Steps(session)

    def step(self, requests, scheduled, finished=()):
        output = types.SimpleNamespace(finished_req_ids=set(finished))
        self.steps._begins(types.SimpleNamespace(args=(self, output), kwargs={}))
        prompts = [prompt for prompt, _ in requests.values()]
        tokens = np.zeros((len(prompts), max(map(len, prompts))), dtype=np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
        self.input_batch = types.SimpleNamespace(
            req_ids=list(requests),
            num_prompt_tokens=np.array([len(prompt) for prompt in prompts]),
            num_computed_tokens_cpu=np.array([computed for _, computed in requests.values()]),
            token_ids_cpu=tokens,
        )
        call = types.SimpleNamespace(self=self, args=(self, output, np.array(scheduled)), kwargs={})
        self.steps._prepared(call, None)
        rows = self.session.rows
        return rows.phase, rows.step, [(run.first_row, run.n_rows, run.first_position) for run in rows.runs]

    def keys(self):
        return [run.request for run in self.session.rows.runs]


@pytest.fixture
def runner(session):
    return Runner(session)


A, B = [1, 2, 3], [4, 5]


def test_StepsOfDecodeFollowEachOther(runner):
    assert runner.step({"a": (A, 0), "b": (B, 0)}, [3, 2]) == ("prefill", 0, [(0, 3, 0), (3, 2, 0)])
    keys = runner.keys()
    for step in range(1, 4):
        expected = "decode", step, [(0, 1, 2 + step), (1, 1, 1 + step)]
        assert runner.step({"a": (A, 2 + step), "b": (B, 1 + step)}, [1, 1]) == expected
        assert runner.keys() == keys
        assert [run.first_position for run in runner.steps.sampled.runs] == [2 + step, 1 + step]


def test_ABatchThatIsNotTheNextIsReadAnew(runner):
    runner.step({"a": (A, 0), "b": (B, 0)}, [3, 2])
    a, b = runner.keys()
    runner.step({"a": (A, 3), "b": (B, 2)}, [1, 1])
    # In another order, with proposed tokens of which one is refused, preempted, computed again, alone.
    assert runner.step({"b": (B, 3), "a": (A, 4)}, [1, 1])[2] == [(0, 1, 3), (1, 1, 4)]
    assert runner.keys() == [b, a]
    assert runner.step({"b": (B, 4), "a": (A, 5)}, [3, 1]) == ("decode", 3, [(0, 3, 4), (3, 1, 5)])
    assert runner.step({"b": (B, 6), "a": (A, 6)}, [3, 1])[2] == [(0, 3, 6), (3, 1, 6)]
    assert runner.step({"b": (B, 9), "a": (A, 0)}, [3, 1]) == ("mixed", 5, [(0, 3, 9), (3, 1, 0)])
    assert runner.step({"a": (A, 1)}, [6], finished=["b"]) == ("prefill", 6, [(0, 6, 1)])
    assert runner.step({"a": (A, 7)}, [1]) == ("decode", 7, [(0, 1, 7)]) and runner.keys() == [a]


def test_AnIdThatComesAgainIsAnotherRequest(runner):
    runner.step({"a": (A, 0)}, [3])
    runner.step({"a": (A, 3)}, [1])
    (first,) = runner.keys()
    longer = [*A, 9, 9]  # its first four are found in the cache
    assert runner.step({"a": (longer, 4)}, [1], finished=["a"]) == ("prefill", 2, [(0, 1, 4)])
    assert runner.keys() != [first]
