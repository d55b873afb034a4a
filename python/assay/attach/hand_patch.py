"""``ASSAY=mla:stderr``: one line on stderr for each call of ``forward_mha`` and rank, in any vLLM process.

What people patch into ``forward_mha`` by hand when an MLA model talks garbage, without the patch: shapes and norms of
what enters and leaves, what kv_b_proj holds, whether there is context. A line looks like this, in one piece::

    assay mla: rank 0 layer 2 call 1 AMXMLAImpl.forward_mha | q [8, 4, 256] bf16 norm 56.3 | k not materialised | ...

Off, nothing of this is imported. On, it writes to stderr alone: what goes wrong in here is counted, said once, and never
reaches vLLM. Every tensor is read once a call, so a run is slower; reading a device's tensor waits for the device, and
inside a graph's capture nothing is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from .output_buffer import FilledBuffer, is_another, ranges, unfit

if TYPE_CHECKING:
    import torch

    from .calls import Call
    from .session import Session

BASE = "vllm.model_executor.layers.attention.mla_attention:MLACommonBaseImpl.forward_mha"
# Where forward_mha is defined, in the versions tried. Classes that inherit it are seen through the first.
TARGETS = (
    BASE,
    "vllm.v1.attention.backends.mla.amx_mla:AMXMLAImpl.forward_mha",
    "vllm.v1.attention.backends.mla.rocm_aiter_mla:AiterMLAImpl.forward_mha",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonImpl.forward_mha",
)
PLAIN = "vllm.model_executor.layers.attention.attention:Attention.__init__"
LARGEST_PRODUCT = 1 << 36
"""Multiplications that reading back a quantised weight through an identity matrix may cost, once a layer."""


def wanted(settings: Mapping[str, str]) -> bool:
    """Whether the settings ask for these lines, in place of a recording."""
    return settings.get("ASSAY") == "mla:stderr"


def install(session: Session) -> None:
    """Puts the lines at every forward_mha there is. The modules are not imported for that."""
    lines = Lines(session)
    for target in TARGETS:
        session.wrap(target, around=lines.around, required=False)
    session.wrap(PLAIN, after=lines.no_mla, required=False)
    session.locals(BASE, ["k#last", "v#last", "has_context#last"], lines.see_locals, required=False)


class Lines:
    """The lines of one process. Calls of one thread nest in order; threads do not meet."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._calls: dict[int, int] = {}  # id of an impl -> calls so far
        self._weights: dict[int, tuple[Any, str]] = {}  # id of a linear -> (itself, so that the id stays its own; text)
        self._said: set[str] = set()
        self._thread = threading.local()

    def around(self, call: Call, proceed: Callable[[], Any]) -> None:
        """Reads the arguments before the call, since kernels may write over them, and the rest behind it."""
        import torch

        try:
            with torch.inference_mode():
                line = Line(self, call)
        except Exception as problem:
            self._lose(problem)
            proceed()
            return
        self._thread.seen = line.seen
        try:
            result = proceed()
        finally:
            self._thread.seen = None
            with torch.inference_mode():
                line.output.restore()
        try:
            with torch.inference_mode():
                write(line.text(result))
        except Exception as problem:
            self._lose(problem)

    def no_mla(self, call: Call, _result: object) -> None:
        """Says once that there will be no lines: the model's attention is another."""
        backend: Any = getattr(call.self, "attn_backend", None)
        name = backend.get_name() if hasattr(backend, "get_name") else "unknown"
        self._say(f"assay mla: no MLA in this run, attention is {type(call.self).__name__} with backend {name}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            write(text)

    def _lose(self, problem: Exception) -> None:
        """A line that could not be made; each reason is said once."""
        self._session.failed("mla:stderr", problem)
        self._say(f"assay mla: a line is lost: {type(problem).__name__}: {one_line(problem)}; the run goes on")

    def see_locals(self, values: dict[str, object], _call: Call) -> None:
        """Local variables of the call under way, each described when the function is done with it."""
        import torch

        seen = getattr(self._thread, "seen", None)
        if seen is None or capturing():
            return
        with torch.inference_mode():
            for name, value in values.items():
                seen[name.partition("#")[0]] = value if isinstance(value, bool) else describe(value)

    def head(self, impl: object, function: object) -> str:
        """Who calls: rank, layer as kv_b_proj's name has it, how often so far."""
        number = self._calls[id(impl)] = self._calls.get(id(impl), 0) + 1
        rank, _world = self._session.rank() if self._session.rank is not None else (0, 1)
        prefix = str(getattr(getattr(impl, "kv_b_proj", None), "prefix", ""))
        layers = [part for part in prefix.split(".") if part.isdigit()]
        layer = f"layer {layers[0]}" if layers else f"impl {id(impl):#x}"
        name = getattr(function, "__name__", "forward_mha")
        return f"assay mla: rank {rank} {layer} call {number} {type(impl).__name__}.{name}"

    def weight(self, impl: object) -> str:
        """Read once: it does not change while the engine serves."""
        linear = getattr(impl, "kv_b_proj", None)
        if linear is None:
            return "kv_b_proj none"
        known = self._weights.get(id(linear))
        if known is None:
            known = (linear, f"kv_b_proj {describe_linear(linear, impl)}")
            self._weights[id(linear)] = known
        return known[1]


class Line:
    """One call: its arguments, read when this is made, and what is known of it when it is over."""

    def __init__(self, lines: Lines, call: Call) -> None:
        self._given = given = call.bound
        impl = given.get("self")
        self._head = lines.head(impl, call.function)
        self.seen: dict[str, Any] = {}  # local variables
        self._inputs: dict[str, str] | None = None
        self.output = Output(None)
        if capturing():
            return
        self._inputs = {name: describe(given.get(name)) for name in ("q", "kv_c_normed", "k_pe")}
        self._weight = lines.weight(impl)
        self.output = Output(given.get("output"), given)  # last: nothing may fail while the buffer holds the pattern

    def text(self, result: object) -> str:
        if self._inputs is None:
            return f"{self._head} | in a graph's capture: not read"
        parts = [self._head, f"q {self._inputs['q']}"]
        parts += [f"{name} {self.seen.get(name, 'not materialised')}" for name in ("k", "v")]
        parts += [f"{name} {self._inputs[name]}" for name in ("kv_c_normed", "k_pe")]
        parts += [self._weight, "has_context " + context(self._given.get("attn_metadata"), self.seen.get("has_context"))]
        parts += ["output " + self.output.state(result)]
        return " | ".join(parts)


def write(line: str) -> None:
    """One write, so that the lines of several ranks do not mix. A closed stderr is no error."""
    try:
        os.write(2, line.encode(errors="backslashreplace") + b"\n")
    except OSError:
        pass


def capturing() -> bool:
    """Whether a CUDA graph is being captured, where reading a tensor would break the capture."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    import torch

    return isinstance(value, torch.Tensor)


def short_dtype(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "float64": "f64"}.get(name, name)


def shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {short_dtype(tensor.dtype)}"


def measure(tensor: torch.Tensor) -> str:
    """"norm 12.3", over the finite elements, and how many are not finite when some are not."""
    import torch

    values = tensor.detach().to(torch.float32)
    finite = torch.isfinite(values)
    bad = int(values.numel() - finite.sum())
    norm = float(torch.linalg.vector_norm(torch.where(finite, values, 0.0), dtype=torch.float64))
    return f"norm {norm:.6g} nonfinite {bad}"


def describe(value: Any) -> str:
    """Shape, dtype, norm and non-finite elements of a tensor; several for a tuple; else the type."""
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(describe(part) for part in value) + ")"
    if not is_tensor(value):
        return "none" if value is None else type(value).__name__
    if value.is_meta:
        return f"{shape(value)} on meta"
    return f"{shape(value)} {measure(value)}"


def context(metadata: Any, local: object) -> str:
    """Whether the call attends to tokens before its own. An impl without that variable tells by the metadata's
    lengths: keys of a request that are not among its new tokens."""
    if isinstance(local, (bool, str)):
        return "yes" if local is True else "no" if local is False else str(local)
    prefill = getattr(metadata, "prefill", None)
    if prefill is None:
        return "unknown: no prefill metadata"
    keys: Any = getattr(prefill, "cpu_seq_lens", None)
    new: Any = getattr(prefill, "extend_seq_lens", None)
    if is_tensor(keys) and is_tensor(new):
        before = int((keys - new).sum())
        return f"not a variable of this impl: {before} tokens before these in the cache"
    chunked = getattr(prefill, "chunked_context", None) is not None
    return "not a variable of this impl: chunked_context " + ("set" if chunked else "none")


# ---- kv_b_proj


def describe_linear(linear: Any, owner: object = None) -> str:
    """Type of a linear layer and what its weight is: shape and norm, for a quantised layer its method, scheme and the norm
    of the dequantised weight, "no weight", or "released, packed in ..." of ``owner`` (an attention impl)."""
    while hasattr(linear, "base_layer"):  # a LoRA wrapper
        linear = linear.base_layer
    kind = linear._get_name() if hasattr(linear, "_get_name") else type(linear).__name__
    method, scheme = getattr(linear, "quant_method", None), getattr(linear, "scheme", None)
    quantised = method is not None and type(method).__name__ not in ("UnquantizedLinearMethod", "CPUUnquantizedLinearMethod")
    if quantised:
        kind += f" quantised by {type(method).__name__}"
        kind += f" scheme {type(scheme).__name__}" if scheme is not None else ""
    stored = weights_of(linear)
    held = {name: tensor for name, tensor in stored.items() if tensor.numel() > 0}
    if held:
        name, weight = next(iter(held.items()))
        text = f"{kind} {name} {shape(weight)}"
        if not quantised and weight.is_floating_point() and weight.element_size() > 1:
            return f"{text} {measure(weight)}"
        return f"{text} {dequantised(linear, weight)}"
    if quantised and answers(linear):
        return f"{kind} no weight, {dequantised(linear, None)}"
    if not stored:
        return f"{kind} no weight"
    if hasattr(linear, "cpu_linear"):  # vLLM on CPU: a function that holds the packed copy
        back = dequantised(linear, None).replace("dequantised", "which holds", 1)
        return f"{kind} weight released, packed in cpu_linear, {back}"
    return f"{kind} {released(owner)}"


def one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:160]


def weights_of(linear: Any) -> dict[str, torch.Tensor]:
    """The layer's tensors under the names that weights go by, empty ones included."""
    found: dict[str, torch.Tensor] = {}
    for name in ("weight", "weight_packed", "qweight", "weight_q", "w"):
        value: Any = getattr(linear, name, None)
        if callable(value) and not is_tensor(value) and hasattr(linear, "_packed_params"):
            value = value()  # torch.ao's quantised layers
        if is_tensor(value):
            found[name] = value
    return found


def released(owner: object) -> str:
    """The weight is there and holds nothing: where a copy of it is kept, as far as the impl shows."""
    packed = [
        f"{type(owner).__name__}.{name} {shape(value)}"
        for name, value in (vars(owner).items() if hasattr(owner, "__dict__") else ())
        if is_tensor(value) and value.dim() >= 2 and value.numel() > 0 and ("pack" in name or "W_" in name)
    ]
    return "weight released, packed in " + (", ".join(packed) if packed else "something that the impl does not show")


def answers(linear: Any) -> bool:
    return hasattr(getattr(linear, "quant_method", None), "apply") and hasattr(linear, "input_size_per_partition")


def dequantised(linear: Any, weight: torch.Tensor | None) -> str:
    """"dequantised [out, in] norm 12.3 (how)" of the weight that the layer works with, or why it can't be told."""
    try:
        plain = None if weight is None else scaled(linear, weight)
        how = "weight x scale"
        if plain is None:
            plain, how = through_identity(linear), "the layer's answer to the identity"
        return f"dequantised {list(plain.shape)} {measure(plain)} ({how})"
    except Exception as problem:  # another library's layer: whatever its code raises is an answer
        return f"not dequantised: {type(problem).__name__}: {one_line(problem)}"


def through_identity(linear: Any) -> torch.Tensor:
    """[out, in]: what the layer makes of the identity. ValueError when that is too much work."""
    import torch

    rows = int(getattr(linear, "input_size_per_partition", 0) or linear.in_features)
    columns = int(getattr(linear, "output_size_per_partition", 0) or getattr(linear, "out_features", 1))
    if rows * rows * columns > LARGEST_PRODUCT:
        raise ValueError(f"{rows} x {rows} x {columns} multiplications are too many to ask the layer for its weight")
    dtype = getattr(linear, "params_dtype", None) or getattr(linear, "orig_dtype", None) or torch.bfloat16
    device = next((p.device for p in linear.parameters()), None)
    eye = torch.eye(rows, dtype=dtype, device=device)
    method = getattr(linear, "quant_method", None)
    result: torch.Tensor = method.apply(linear, eye, bias=None) if method is not None else linear(eye)
    return result.t()


def scaled(linear: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """8-bit weight times its scale, one a tensor, a row, a logical part or a block; None: another form."""
    import torch

    if weight.is_quantized:
        return weight.dequantize()
    if weight.dim() != 2 or weight.element_size() != 1 or weight.dtype == torch.uint8:
        return None
    if any(is_tensor(getattr(linear, n, None)) for n in ("weight_zero_point", "qzeros", "weight_g_idx")):
        return None
    scale = next((s for n in ("weight_scale", "weight_scale_inv") if is_tensor(s := getattr(linear, n, None))), None)
    if scale is None:
        return None
    values: torch.Tensor = weight.detach().to(torch.float32)
    scale = scale.detach().to(torch.float32)
    sizes = getattr(linear, "output_size_per_partition", None), getattr(linear, "input_size_per_partition", None)
    kept = tuple(weight.shape)  # [in, out] where the kernel wants that
    if kept == sizes[::-1] and (kept != sizes or (weight.stride(0) == 1 and weight.stride(1) != 1)):
        values = values.t()
    rows, columns = values.shape
    block = getattr(linear, "weight_block_size", None)
    if block and scale.dim() == 2:
        scale = scale.repeat_interleave(int(block[0]), 0)[:rows].repeat_interleave(int(block[1]), 1)[:, :columns]
        blocks: torch.Tensor | None = values * scale if scale.shape == values.shape else None
        return blocks
    if scale.numel() == rows:
        scale = scale.reshape(rows, 1)
    elif scale.numel() != 1:
        return None
    product: torch.Tensor = values * scale.reshape(-1, 1)
    return product


# ---- the output buffer


class Output:
    """Whether a call fills the buffer that it was given (output_buffer.py)."""

    def __init__(self, buffer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        """arguments: all of the call's, of which the buffer is "output"."""
        self._buffer = buffer if is_tensor(buffer) else None
        self._unfit = unfit(buffer, "output", arguments or {})
        self._filled = None if self._unfit else FilledBuffer(buffer)

    def restore(self) -> None:
        """Gives elements that were not written their bits back, and remembers which they were."""
        if self._filled is not None:
            self._filled.restore()

    def state(self, result: object) -> str:
        """"written", "UNTOUCHED" or "PARTLY WRITTEN", with the rows that were left as they were."""
        if self._buffer is None:
            return "none"
        if self._filled is None:
            return f"{shape(self._buffer)} not audited ({self._unfit}) {measure(self._buffer)}"
        n, left = self._buffer.numel(), self._filled.count
        text = f"{shape(self._buffer)} " + ("written" if left == 0 else "UNTOUCHED" if left == n else "PARTLY WRITTEN")
        if left:
            text += f", {left} of {n} elements left as they were, in rows {ranges(self._filled.rows, 8)}"
            if is_another(result, self._buffer):
                text += f"; the call returned a tensor of its own, {describe(result)}"
        return f"{text} {measure(self._buffer)}"
