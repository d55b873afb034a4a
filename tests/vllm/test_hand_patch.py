"""ASSAY=mla:stderr in the real vLLM: a line for each call of forward_mha and rank, and nothing else changed."""

import json
import re
import subprocess

import pytest
from ahead import ahead
from conftest import EAGER_RIGHT, HERE, PYTHON, environment

OPTIONS = {"prompts": 4, "tokens": 4, "engine": {**EAGER_RIGHT, "tensor_parallel_size": 2}}


@ahead(cores=2)
def lines(bench, cores):
    run = bench.run("hand-patch", cores, OPTIONS, "--profile", "mla:stderr")
    return run, [line[line.index("assay mla:") :] for line in run.log.splitlines() if "assay mla:" in line]


@ahead()
def quantised(bench, cores):
    done = subprocess.run(
        [PYTHON, HERE / "hand_patch_layers.py"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(bench.cache, cores, PYTHONPATH=str(HERE.parents[1] / "python")),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_rank_and_layer_has_its_lines(lines):
    run, text = lines
    calls = [re.match(r"assay mla: rank (\d) layer (\d) call (\d+) CPUMLAImpl\.forward_mha \| ", t).groups() for t in text]
    assert {c[:2] for c in calls} == {(str(r), str(n)) for r in range(2) for n in range(4)}
    assert len(calls) == len(set(calls))
    assert [a["tokens"] for a in run.answers] and all(len(a["tokens"]) == 4 for a in run.answers)


def test_a_line_has_what_the_patch_printed_and_more(lines):
    for text in lines[1]:
        tokens = int(re.search(r"\| q \[(\d+), 2, 256\] bf16 norm [\d.]+ nonfinite 0 \|", text)[1])
        for part in ("k", "v"):
            assert re.search(rf"\| {part} \[{tokens}, 2, 256\] bf16 norm [\d.]+ nonfinite 0 \|", text)
        assert re.search(rf"\| kv_c_normed \[{tokens}, 512\] bf16 norm [\d.]+ nonfinite 0 \|", text)
        assert re.search(r"\| kv_b_proj ColumnParallelLinear weight \[896, 512\] bf16 norm [\d.]+ nonfinite 0 \|", text)
        assert "| has_context no |" in text
        assert re.search(rf"\| output \[{tokens}, 512\] bf16 written norm [\d.]+ nonfinite 0$", text)


@pytest.mark.parametrize("layer", ["plain", "int8 channel", "int8 tensor"])
@pytest.mark.parametrize("when", ["loaded", "processed"])
def test_norm_of_a_real_layers_weight(quantised, layer, when):
    expected, text = quantised[f"{layer} {when}"]
    assert float(re.search(r"norm ([\d.]+)", text)[1]) == pytest.approx(expected, rel=1e-3)
    assert "[1792, 512]" in text
    if layer != "plain":
        assert "quantised by CompressedTensorsLinearMethod scheme CompressedTensorsW8A8Int8" in text
        assert "dequantised" in text
    elif when == "processed":
        assert "weight released, packed in cpu_linear" in text


def test_amx_works_in_the_latent_space_and_has_released_its_weight(quantised):
    """The real AMXMLAImpl.forward_mha, its kernels replaced by PyTorch's: this machine need not have AMX."""
    line = quantised["amx"][1]
    assert "AMXMLAImpl.forward_mha |" in line
    assert "| k not materialised | v not materialised |" in line
    assert "weight released, packed in AMXMLAImpl._w_uk_packed [4, 512, 192] bf16, AMXMLAImpl._w_uv_packed [4, 256, 512] bf16" in line
    assert "has_context not a variable of this impl: 5 tokens before these in the cache" in line
    assert "output [3, 1024] bf16 written" in line
