"""Sites that are outputs of vLLM's modules: embedding, norms, projections, feed-forward, experts.

A table maps module paths (``model.layers.3.mlp.gate_up_proj``) to readers. A reader takes what went in and came out
and gives sites with tensors; it makes views only. vLLM adds the residual inside its norms, so the residual stream
behind layer N (``layers.N.out``) is the second result of the norm that follows, which is the tensor that the engine
goes on with: nothing is added up here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from .vllm_attention import Attention, layer_of
from .vllm_compile import Compilation
from .vllm_experts import Experts
from .vllm_reduce import Reductions
from .vllm_steps import Recorder

LOADER = "vllm.model_executor.model_loader.base_loader"
Shard = Callable[[int], dict[str, int]]
Sites = Iterator[tuple[str, Any, bool]]
"""Site below the layer (or whole name), tensor, and whether the ranks hold parts of its columns."""
Reader = Callable[["Place", tuple[Any, ...], Any], Sites]


@dataclasses.dataclass(frozen=True)
class Place:
    """A module of the model: ``layer`` None outside of the layers; ``last`` is the number of the last layer."""

    path: str
    module: Any
    layer: int | None
    last: int
    parent: Any  # the module that has it


def first(output: Any) -> Any:
    """vLLM's linear layers give (output, bias)."""
    return output[0] if isinstance(output, tuple) else output


def _plain(site: str, cut: bool = False) -> Reader:
    def read(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
        yield site, first(output), cut

    return read


def _input_norm(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    if isinstance(output, tuple) and place.layer:
        yield f"layers.{place.layer - 1}.out", output[1], False
    yield "input_norm", first(output), False


def _final_norm(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    if isinstance(output, tuple):
        yield f"layers.{place.last}.out", output[1], False
    yield "final_norm", first(output), False


def _latents(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    """fused_qkv_a_proj: both latents by one product."""
    a, rank = first(output), place.parent.q_lora_rank
    yield "attn.q_a", a[..., :rank], False
    yield "attn.kv_a", a[..., rank:], False


def _q_proj(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    q = first(output)
    yield "attn.q_proj", q.view(q.shape[0], -1, place.parent.qk_head_dim), True


def _qkv_proj(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    qkv, attention = first(output), place.parent
    start = 0
    for name, size in (("q_proj", attention.q_size), ("k_proj", attention.kv_size), ("v_proj", attention.kv_size)):
        part = qkv[..., start : start + size]
        yield f"attn.{name}", part.view(part.shape[0], -1, attention.head_dim), True
        start += size


def _gate_up(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    both = first(output)
    half = both.shape[-1] // 2
    yield "mlp.gate", both[..., :half], True
    yield "mlp.up", both[..., half:], True


def _routed(place: Place, args: tuple[Any, ...], output: Any) -> Sites:
    yield "moe.out", first(output), False


TABLE: tuple[tuple[str, Reader], ...] = (
    (r"(model\.)?embed_tokens", _plain("embed")),
    (r"(model\.)?norm", _final_norm),
    (r"input_layernorm", _input_norm),
    (r"post_attention_layernorm", _plain("post_norm")),
    (r"self_attn\.fused_qkv_a_proj", _latents),
    (r"self_attn\.q_a_proj", _plain("attn.q_a")),
    (r"self_attn\.kv_a_proj_with_mqa", _plain("attn.kv_a")),
    (r"self_attn\.q_a_layernorm", _plain("attn.q_a_normed")),
    (r"self_attn\.kv_a_layernorm", _plain("attn.kv_c_normed")),
    (r"self_attn\.(q_b_proj|q_proj)", _q_proj),
    (r"self_attn\.qkv_proj", _qkv_proj),
    (r"self_attn\.o_proj", _plain("attn.o_proj")),
    (r"mlp\.gate_up_proj", _gate_up),
    (r"mlp\.act_fn", _plain("mlp.act", True)),
    (r"mlp\.down_proj", _plain("mlp.down")),
    (r"(mlp|block_sparse_moe)\.gate", _plain("moe.router_logits")),
    (r"(mlp|block_sparse_moe)\.experts", _routed),
    (r"mlp\.shared_experts", _plain("moe.shared")),
)
_TABLE = tuple((re.compile(r"(?:.*\.)?layers\.(\d+)\." + p if not p.startswith("(model") else p), r) for p, r in TABLE)


def places(model: Any) -> Iterator[tuple[Place, Reader]]:
    """The modules of a model that the table names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    numbers = [int(n) for n in re.findall(r"(?:^|\n)(?:.*\.)?layers\.(\d+)(?=\n|$)", "\n".join(modules))]
    last = max(numbers, default=-1)
    seen = set()
    for path, module in modules.items():
        for pattern, reader in _TABLE:
            match = pattern.fullmatch(path)
            if match is None or id(module) in seen:
                continue
            seen.add(id(module))
            layer = match.group(1) if match.re.pattern.startswith("(?:.*") else None
            parent = modules.get(path.rpartition(".")[0])
            yield Place(path, module, None if layer is None else int(layer), last, parent), reader
            break


class Modules:
    """Observes the modules of the model once its weights are loaded."""

    def __init__(
        self,
        recorder: Recorder,
        compilation: Compilation,
        attention: Attention,
        reductions: Reductions,
        experts: Experts,
        shard: Shard,
    ) -> None:
        self._recorder = recorder
        self._session = recorder.session
        self._compilation = compilation
        self._attention = attention
        self._reductions = reductions
        self._experts = experts
        self._shard = shard
        self._by_path: dict[str, tuple[Place, Reader]] = {}
        self._session.wrap(f"{LOADER}:process_weights_after_loading", after=self._loaded)

    def _loaded(self, call: Any, result: Any) -> None:
        model = call.args[0]
        for name, module in model.named_modules():
            if hasattr(module, "qk_nope_head_dim") and hasattr(module, "attn") and not hasattr(module, "mla_attn"):
                layer = layer_of(name + ".")
                if layer is not None:
                    self._attention.heads[layer] = (
                        module.qk_nope_head_dim,
                        module.qk_rope_head_dim,
                        module.v_head_dim,
                    )
        for place, reader in places(model):
            if place.path.endswith(".kv_a_layernorm") and place.layer not in self._attention.heads:
                continue  # MLA: seen where it enters attention
            self._by_path[place.path] = (place, reader)
        self._reductions.expect(self._by_path.values())
        if not self._compilation.compiled():
            self._experts.install()
        visible = self._compilation.visible(self._by_path)
        if visible:
            self._session.modules(model, visible, then=self._ran, label="module:vllm")

    def _ran(self, module: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        place, reader = self._by_path[name]
        for site, tensor, cut in reader(place, args, output):
            fields: dict[str, Any] = {}
            if cut:
                columns = 1
                for extent in tensor.shape[1:]:
                    columns *= extent
                fields = self._shard(columns)
            self._recorder.record(site, tensor, place.layer, engine_name=name, **fields)
