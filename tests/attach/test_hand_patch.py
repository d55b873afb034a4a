"""The lines of ASSAY=mla:stderr, without an engine: what they say of weights and of output buffers."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")

from assay.attach import hand_patch  # noqa: E402
from assay.attach.hand_patch import Lines, Output, describe, describe_linear  # noqa: E402
from assay.attach.output_buffer import ranges  # noqa: E402


class Method:
    """A quantisation method, as vLLM's linear layers have one."""

    def __init__(self, answer=None):
        self.answer = answer

    def apply(self, layer, x, bias=None):
        if self.answer is None:
            raise RuntimeError("no kernel\nfor this shape")
        return x @ self.answer.t().to(x.dtype)


class Scheme:
    pass


def layer(method=None, scheme=None, rows=8, columns=6, **tensors):
    made = torch.nn.Module()
    made.quant_method, made.scheme = method, scheme
    made.input_size_per_partition, made.output_size_per_partition = columns, rows
    made.params_dtype = torch.float32
    for name, tensor in tensors.items():
        setattr(made, name, tensor)
    return made


def norm_in(text: str) -> float:
    return float(text.split("norm ")[1].split()[0])


# ---- weights


def test_plain_weight_has_shape_and_norm():
    linear = torch.nn.Linear(6, 8, bias=False)
    text = describe_linear(linear)
    assert text.startswith("Linear weight [8, 6] f32 norm ")
    assert norm_in(text) == pytest.approx(linear.weight.double().norm().item(), rel=1e-5)


@pytest.mark.parametrize("form", ["tensor", "row", "block", "transposed"])
def test_scaled_weight_is_dequantised(form):
    torch.manual_seed(1)
    codes = torch.randint(-127, 128, (8, 6), dtype=torch.int8)
    kwargs = {}
    scale = {"tensor": torch.rand(1), "row": torch.rand(8, 1), "block": torch.rand(2, 3), "transposed": torch.rand(8, 1)}[form]
    full = scale
    if form == "block":
        kwargs["weight_block_size"] = [4, 2]
        full = scale.repeat_interleave(4, 0).repeat_interleave(2, 1)
    stored = codes.t() if form == "transposed" else codes  # [in, out], as some kernels want it
    expected = (codes.double() * full.double()).norm().item()
    text = describe_linear(layer(Method(), Scheme(), weight=stored, weight_scale=scale, **kwargs))
    assert "quantised by Method scheme Scheme" in text
    assert "dequantised [" in text and "weight x scale" in text
    assert norm_in(text) == pytest.approx(expected, rel=1e-5)


def test_packed_weight_is_read_back_through_the_layer():
    torch.manual_seed(2)
    answer = torch.randn(8, 6)
    text = describe_linear(layer(Method(answer), qweight=torch.zeros(3, 8, dtype=torch.int32)))
    assert "qweight [3, 8] int32" in text and "dequantised [8, 6]" in text
    assert norm_in(text) == pytest.approx(answer.double().norm().item(), rel=1e-5)


def test_layer_that_refuses_is_named_with_its_reason():
    text = describe_linear(layer(Method(), qweight=torch.zeros(3, 8, dtype=torch.int32)))
    assert "not dequantised: RuntimeError: no kernel for this shape" in text


def test_quantised_layer_without_weight_still_answers():
    answer = torch.full((8, 6), 2.0)
    text = describe_linear(layer(Method(answer)))
    assert "quantised by Method no weight, dequantised [8, 6]" in text
    assert norm_in(text) == pytest.approx((48 * 4) ** 0.5, rel=1e-5)


def test_work_that_is_too_much_is_not_done():
    huge = layer(Method(torch.zeros(1)), qweight=torch.zeros(1, dtype=torch.int32), columns=1 << 20, rows=1 << 20)
    assert "not dequantised: ValueError" in describe_linear(huge)


def test_no_weight_and_released_weight_are_told_apart():
    plain = type("UnquantizedLinearMethod", (), {})()
    assert describe_linear(layer(plain)).endswith("no weight")
    impl = types.SimpleNamespace(_w_uk_packed=torch.zeros(4, 5, 6), scale=1.0, W_tiny=torch.zeros(3))
    text = describe_linear(layer(plain, weight=torch.empty(0)), impl)
    assert text.endswith("weight released, packed in SimpleNamespace._w_uk_packed [4, 5, 6] f32")
    assert describe_linear(layer(plain, weight=torch.empty(0))).endswith("something that the impl does not show")


@pytest.mark.filterwarnings("ignore")
def test_torch_quantised_layer_is_dequantised():
    # torch says that this API is deprecated; the layers are still met.
    model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(6, 8)), {torch.nn.Linear}, torch.qint8)
    text = describe_linear(model[0])
    assert text.startswith("DynamicQuantizedLinear") and "dequantised [8, 6]" in text
    assert norm_in(text) == pytest.approx(model[0].weight().dequantize().double().norm().item(), rel=1e-5)


# ---- tensors


def test_non_finite_elements_are_counted_and_left_out_of_the_norm():
    assert describe(torch.tensor([3.0, float("nan"), 4.0, float("inf")])) == "[4] f32 norm 5 nonfinite 2"
    assert describe(None) == "none"
    assert describe((torch.ones(1), 3)) == "([1] f32 norm 1 nonfinite 0, int)"


def test_many_ranges_are_cut_short():
    assert ranges([0, 1, 2, 5], 8) == "0-2,5"
    assert ranges(list(range(0, 40, 2)), 8).endswith(",14 and 12 ranges more")


# ---- output buffers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_unwritten_rows_are_named_and_keep_their_bits(dtype):
    buffer = torch.arange(24, dtype=dtype).reshape(4, 6)
    before = buffer.clone()
    output = Output(buffer)
    buffer[1] = 7
    output.restore()
    assert "PARTLY WRITTEN, 18 of 24 elements left as they were, in rows 0,2-3" in output.state(None)
    before[1] = 7
    assert torch.equal(buffer, before)


def test_tensor_of_its_own_is_reported():
    buffer = torch.ones(4, 6)
    output = Output(buffer)
    output.restore()
    text = output.state(torch.zeros(4, 6))
    assert "UNTOUCHED" in text and "returned a tensor of its own, [4, 6] f32" in text
    assert torch.equal(buffer, torch.ones(4, 6))


def test_whole_buffer_written_and_strided_views():
    storage = torch.zeros(4, 12)
    view = storage[:, 3:9]
    output = Output(view)
    view.copy_(torch.ones(4, 6))
    output.restore()
    assert " written norm" in output.state(None)
    assert storage.sum() == 24


def test_bytes_are_not_audited():
    buffer = torch.zeros(4, dtype=torch.uint8)
    output = Output(buffer)
    output.restore()
    assert "not audited (output is torch.uint8: elements of one byte" in output.state(None) and buffer.sum() == 0


def test_buffer_that_is_an_input_too_is_not_audited():
    buffer = torch.ones(4)
    output = Output(buffer, {"q": buffer[1:], "output": buffer})
    output.restore()
    assert "not audited (output shares memory with q)" in output.state(None) and buffer.sum() == 4


# ---- the lines


class Impl:
    def __init__(self):
        self.kv_b_proj = torch.nn.Linear(3, 2, bias=False)
        self.kv_b_proj.prefix = "model.layers.7.self_attn.kv_b_proj"

    def forward_mha(self, q, kv_c_normed, k_pe, output):
        output.copy_(q)


class FakeSession:
    def __init__(self):
        self.failures = []
        self.rank = lambda: (1, 2)

    def failed(self, what, problem):
        self.failures.append(problem)


def call_of(impl, function=Impl.forward_mha, **given):
    return types.SimpleNamespace(bound={"self": impl, **given}, function=function)


def run(lines, impl, body, **given):
    return lines.around(call_of(impl, **given), body)


def test_a_line_holds_rank_layer_and_what_was_asked_for(capfd):
    impl, output = Impl(), torch.zeros(2, 3)
    q = torch.ones(2, 3)
    lines = Lines(FakeSession())
    for _ in range(2):
        run(lines, impl, lambda: output.copy_(q), q=q, kv_c_normed=q, k_pe=None, output=output)
    text = capfd.readouterr().err.splitlines()
    assert len(text) == 2
    assert text[1].startswith("assay mla: rank 1 layer 7 call 2 Impl.forward_mha | q [2, 3] f32 norm 2.44949 nonfinite 0 | k not materialised")
    assert "kv_b_proj Linear weight [2, 3]" in text[1] and "output [2, 3] f32 written" in text[1]


def test_local_variables_are_those_of_the_call(capfd):
    lines, q = Lines(FakeSession()), torch.ones(2, 3)

    def body():
        lines.see_locals({"k#last": q * 2, "has_context": False}, None)

    run(lines, Impl(), body, q=q, output=None)
    lines.see_locals({"k#last": q}, None)  # outside of a call: nobody's
    text = capfd.readouterr().err
    assert "| k [2, 3] f32 norm 4.89898 nonfinite 0 | v not materialised |" in text
    assert "has_context no | output none" in text


def test_error_of_the_call_passes_and_the_buffer_has_its_bits_back():
    output = torch.arange(6.0)

    def body():
        raise KeyError("the host's own")

    with pytest.raises(KeyError):
        run(Lines(FakeSession()), Impl(), body, q=None, output=output)
    assert torch.equal(output, torch.arange(6.0))


def test_line_that_cannot_be_made_is_said_once_and_the_call_runs(capfd, monkeypatch):
    monkeypatch.setattr(hand_patch, "describe", lambda value: 1 / 0)
    session, ran = FakeSession(), []
    lines = Lines(session)
    for _ in range(3):
        run(lines, Impl(), lambda: ran.append(1), q=None, output=torch.zeros(2))
    assert len(ran) == 3 and len(session.failures) == 3
    assert capfd.readouterr().err.count("a line is lost: ZeroDivisionError") == 1


def test_closed_stderr_changes_nothing():
    program = "import os\nos.close(2)\nfrom assay.attach.hand_patch import write\nwrite('x')\nprint('went on')\n"
    package = str(pathlib.Path(hand_patch.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": package}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "went on\n"


def test_only_this_profile_and_sink_want_it():
    assert hand_patch.wanted({"ASSAY": "mla:stderr"})
    assert not hand_patch.wanted({"ASSAY": "mla"})
    assert not hand_patch.wanted({"ASSAY": "all:stderr"})
    assert not hand_patch.wanted({})
