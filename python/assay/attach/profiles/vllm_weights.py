"""Weights as loaded and as the kernels keep them, and the quantisation of every linear layer.

Recorded twice, in phase ``load``: when the checkpoint has been loaded, and after process_weights_after_loading, where
an implementation may pack a weight and release it. The second one is recorded where its bits changed; what was
released is noted with the place of what was made of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..rows import Rows
from ..session import Session
from .vllm_modules import LOADER

_NAMES = (  # path in vLLM -> canonical name
    (re.compile(r"^(?:model\.)?layers\.(\d+)\.self_attn\.(?:mla_attn\.)?(.+)$"), r"layers.\1.attn.\2"),
    (re.compile(r"^(?:model\.)?layers\.(\d+)\.(.+)$"), r"layers.\1.\2"),
    (re.compile(r"^model\.(.+)$"), r"\1"),
)


def weight_name(path: str) -> str:
    """``model.layers.3.self_attn.o_proj.weight`` -> ``layers.3.attn.o_proj.weight``."""
    for pattern, name in _NAMES:
        found = pattern.match(path)
        if found:
            return found.expand(name)
    return path


class Weights:
    """shard: columns of this rank's part -> where they lie in the whole; nothing without tensor parallelism."""

    def __init__(self, session: Session, shard: Callable[[int], dict[str, int]]) -> None:
        self._session = session
        self._shard = shard
        self._modules: dict[str, Any] = {}
        self._before: dict[str, tuple[int, tuple[int, ...]]] = {}  # path -> (address, shape)
        session.wrap(f"{LOADER}:process_weights_after_loading", before=self._loaded, after=self._processed)

    def _loaded(self, call: Any) -> None:
        model = call.args[0]
        self._modules = dict(model.named_modules())
        for path, module in self._modules.items():
            method = getattr(module, "quant_method", None)
            if method is not None:
                kinds = [type(module).__name__, type(method).__name__]
                if getattr(module, "scheme", None) is not None:
                    kinds.append(type(module.scheme).__name__)
                self._session.fact(f"linear.{path}", ":".join(kinds))
        for path, weight in model.named_parameters():
            self._before[path] = (weight.data_ptr(), tuple(weight.shape))
            self._record(path, weight, "loaded")

    def _processed(self, call: Any, result: Any) -> None:
        model = call.args[0]
        now = dict(model.named_parameters())
        made = _packed(model)
        for path, (address, shape) in self._before.items():
            weight = now.get(path)
            if weight is None or weight.numel() == 0:
                place = made.get(path.rpartition(".")[0], "a form that this profile does not know")
                self._session.absent(f"{weight_name(path)}", f"released, packed in {place}")
            elif weight.data_ptr() != address or tuple(weight.shape) != shape:
                self._record(path, weight, "processed")
        for path, weight in now.items():
            if path not in self._before:
                self._record(path, weight, "processed")
        for path, module in model.named_modules():
            if hasattr(module, "W_UV") and hasattr(module, "W_UK_T"):  # not always parameters
                for name in ("W_UK_T", "W_UV"):
                    if f"{path}.{name}" not in now:
                        self._record(f"{path}.{name}", getattr(module, name), "processed")
        self._before.clear()
        self._modules.clear()

    def _record(self, path: str, weight: Any, state: str) -> None:
        name = re.sub(r"\.mla_attn\.|\.attn\.(?=W_U)", ".", weight_name(path))
        if not self._session.observed(name) or weight.numel() == 0:
            return
        rows, axes = Rows([], phase="load"), _axes(name, weight.ndim)
        fields, meta = self._cut(path, weight)
        meta["weights"] = state
        self._session.record(name, weight.detach(), rows=rows, engine_name=path, axes=axes, meta=meta, **fields)

    def _cut(self, path: str, weight: Any) -> tuple[dict[str, int], dict[str, object]]:
        """Shard fields and metadata of a weight that the ranks cut: along its rows (outputs) or columns (inputs)."""
        owner, _, leaf = path.rpartition(".")
        module = self._modules.get(owner)
        kinds = {base.__name__ for base in type(module).__mro__}
        if leaf in ("W_UK_T", "W_UV") or {"ColumnParallelLinear", "VocabParallelEmbedding"} & kinds:
            axis = 0
        elif "RowParallelLinear" in kinds and weight.ndim == 2:
            return self._shard(weight.shape[-1]), {}
        elif leaf in ("w13_weight", "w2_weight"):
            axis = 1 if leaf == "w13_weight" else 2
        else:
            return {}, {}
        if getattr(module, "tp_size", 2) == 1:  # a layer that every rank has whole
            return {}, {}
        fields = self._shard(weight.shape[-1])
        if fields:
            fields.update(shard_col_offset=0, shard_full_cols=0)
        meta: dict[str, object] = {"shard_axis": axis} if fields else {}
        parts = getattr(module, "output_sizes", None)
        if fields and parts and len(parts) > 1:
            names = {2: ("gate_proj", "up_proj"), 3: ("q_proj", "k_proj", "v_proj")}.get(len(parts), ())
            meta["parts"] = ",".join(f"{n}:{size // fields['shard_count']}" for n, size in zip(names, parts))
        return fields, meta


def _axes(name: str, ndim: int) -> str:
    if name.endswith("W_UK_T"):
        return "H dn c"
    if name.endswith("W_UV"):
        return "H c dv"
    return {0: "", 1: "in", 2: "out in", 3: "E out in"}.get(ndim, " ".join(f"a{i}" for i in range(ndim)))


def _packed(model: Any) -> dict[str, str]:
    """Module path -> where its weight lives on."""
    made = {}
    for path, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            free = getattr(module.cpu_linear, "__closure__", None)
            names = getattr(getattr(module.cpu_linear, "__code__", None), "co_freevars", ())
            made[path] = f"the handler of cpu_linear ({', '.join(names)})" if free else "cpu_linear"
        if getattr(module, "is_amx_bmm_enabled", False):
            made[f"{path.rpartition('.')[0]}.kv_b_proj"] = "impl._w_uk_packed and impl._w_uv_packed"
    return made
