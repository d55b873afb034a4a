"""Queries, keys, values, cache rows and output of one attention module, from the attention function's arguments and
from Cache.update. B slots, T columns of the forward, S columns of the cache, H heads, Hkv key heads.

The function sees keys and values of the whole cache; recorded are the rows of this forward.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from . import _hf_views as views
from ._hf_rows import Forward

if TYPE_CHECKING:
    from ._hf_decoder import Layer

NO_CACHE = "a forward ran without a cache"
FEWER = "the cache keeps fewer rows than a forward has"
EXPANDED = "the cache holds expanded keys and values, not the latent"


class Attention:
    """The sites of one layer's attention."""

    def __init__(self, layer: Layer, attention: Any) -> None:
        self.layer = layer
        self.kind = type(attention)
        self.mla = hasattr(attention, "kv_b_proj")
        self.nope = attention.qk_nope_head_dim if self.mla else 0
        self.latent = attention.kv_lora_rank if self.mla else 0
        # The rotation of this name leaves the members of pairs apart; a module that has it uses it as the config says.
        self.apart = (
            self.mla
            and hasattr(sys.modules[self.kind.__module__], "apply_rotary_pos_emb_interleave")
            and getattr(layer.decoder.config, "rope_interleave", True)
        )
        self._order: Any = None  # channels of a head in the checkpoint's order
        self._cached: Forward | None = None  # the forward whose k_pe was seen on its way into the cache
        source = "self_attn, attention function"
        for name in ("q_nope", "q_pe", "q", "k_nope", "k", "v", "out") if self.mla else ("q", "k", "v", "out"):
            layer.site(f"attn.{name}", source)
        layer.site("attn.kv_write", "Cache.update", axes=None if self.mla else "T H d")
        if self.mla:
            layer.site("attn.k_pe", "Cache.update")

    def cache_rows(self, forward: Forward, key: Any, value: Any, keys: Any, values: Any) -> None:
        """key, value [B, H, T, .]: what goes into the cache; keys, values [B, H, S, .]: the cache behind it. MLA keeps
        the normed latent for keys and the rotated k_pe for values, one head each."""
        absent = self.layer.decoder.session.absent
        if self.mla and (key.shape[1] != 1 or key.shape[-1] != self.latent):
            absent("layers.*.attn.kv_write", EXPANDED)
            return
        if self.mla:
            self._cached = forward
            self.layer.put("attn.k_pe", self._paired(views.head_rows(value)), forward.rows)
        if not self.layer.wants("attn.kv_write", forward):
            return
        keys = views.new_columns(keys, forward.past, forward.length)
        values = views.new_columns(values, forward.past, forward.length)
        if keys is None or values is None:
            absent("layers.*.attn.kv_write", FEWER)
            return
        keys, values = views.head_rows(keys), views.head_rows(values)
        both = torch.cat((keys, self._paired(values) if self.mla else values), dim=-1)
        self.layer.put("attn.kv_write", both.flatten(1) if self.mla else both, forward.rows)

    def operands(self, forward: Forward, query: Any, key: Any, value: Any) -> None:
        """query [B, H, T, d]; key, value [B, Hkv, S, .], of all columns so far."""
        rows, put = forward.rows, self.layer.put
        query = views.head_rows(query)
        key = views.new_columns(key, forward.past, forward.length)
        value = views.new_columns(value, forward.past, forward.length)
        if self.mla:
            query = self._paired_behind(query)
            put("attn.q_nope", query[..., : self.nope], rows)
            put("attn.q_pe", query[..., self.nope :], rows)
        put("attn.q", query, rows)
        if key is None or value is None:
            return
        key = views.head_rows(key)
        if self.mla:
            key = self._paired_behind(key)
            if self._cached is not forward:
                put("attn.k_pe", key[:, :1, self.nope :], rows)
            put("attn.k_nope", key[..., : self.nope], rows)
        put("attn.k", key, rows)
        put("attn.v", views.head_rows(value), rows)

    def output(self, forward: Forward, output: Any) -> None:
        """output [B, T, H, dv]."""
        self.layer.put("attn.out", output.flatten(0, 1), forward.rows)

    def _paired_behind(self, tensor: Any) -> Any:
        """Heads [..., nope + rope] with the rotary part, which stands behind, in the checkpoint's order."""
        if not self.apart:
            return tensor
        if self._order is None or self._order.device != tensor.device:
            order = torch.arange(tensor.shape[-1], device=tensor.device)
            order[self.nope :] = views.interleaved(order[self.nope :])
            self._order = order
        return tensor.index_select(-1, self._order)

    def _paired(self, tensor: Any) -> Any:
        return views.interleaved(tensor) if self.apart else tensor
