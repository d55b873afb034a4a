"""Describes real vLLM layers on CPU for test_hand_patch.py; prints {"LAYER WHEN": [expected norm, text]} as JSON."""

import json
import os
import socket
import types

import torch
from assay.attach import hand_patch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.v1.attention.backends.mla import amx_mla

OUT, IN = 1792, 512


def int8(strategy):
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return CompressedTensorsConfig.from_config(
        {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": [], "config_groups": {"group_0": group}}
    )


def layers(found):
    generator = torch.Generator().manual_seed(3)
    for name, config in (("plain", None), ("int8 channel", int8("channel")), ("int8 tensor", int8("tensor"))):
        linear = ColumnParallelLinear(IN, OUT, bias=False, quant_config=config, prefix="model.layers.0.self_attn.kv_b_proj")
        if config is None:
            linear.weight.data.copy_(torch.randn(OUT, IN, generator=generator))
            norm = linear.weight.data.double().norm().item()
        else:
            codes = torch.randint(-127, 128, (OUT, IN), generator=generator, dtype=torch.int32)
            linear.weight.data.copy_(codes.to(torch.int8))
            linear.weight_scale.data.copy_(torch.rand(linear.weight_scale.shape, generator=generator) * 0.01)
            norm = (linear.weight.data.double() * linear.weight_scale.data.double()).norm().item()
        found[f"{name} loaded"] = norm, hand_patch.describe_linear(linear)
        linear.quant_method.process_weights_after_loading(linear)
        found[f"{name} processed"] = norm, hand_patch.describe_linear(linear)


def amx(found):
    """forward_mha of an impl made without its constructor, which wants a machine with AMX."""
    ops = types.SimpleNamespace(
        bmm_cpu=lambda out, a, b, packed, scale: out.copy_(torch.bmm(a, b.transpose(1, 2))),
        cpu_mla_extend=lambda q, k, v, out, *rest: out.copy_(q[..., :IN]),
    )
    amx_mla.ops = ops
    impl = object.__new__(amx_mla.AMXMLAImpl)
    impl.num_heads, impl.head_size, impl.kv_lora_rank, impl.scale = 4, 576, IN, 1.0
    impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim = 192, 64, 256
    impl.kv_b_proj = ColumnParallelLinear(IN, OUT, bias=False, prefix="model.layers.1.self_attn.kv_b_proj")
    impl.kv_b_proj.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    impl._w_uk_packed, impl._w_uv_packed, impl._w_scale = torch.randn(4, IN, 192), torch.randn(4, 256, IN), None
    lengths = types.SimpleNamespace(
        req_to_token=None, req_pool_indices=None, cpu_seq_lens=torch.tensor([8]), extend_seq_lens=torch.tensor([3]),
        extend_start_loc=None, max_len_extend=3,
    )  # fmt: skip
    said, session = [], types.SimpleNamespace(rank=lambda: (0, 1), failed=lambda what, problem: said.append(repr(problem)))
    hand_patch.write = said.append
    given = {
        "self": impl, "q": torch.randn(3, 4, 256), "kv_c_normed": torch.randn(3, IN), "k_pe": torch.randn(3, 1, 64),
        "kv_c_and_k_pe_cache": torch.zeros(2, 32, 576), "attn_metadata": types.SimpleNamespace(prefill=lengths),
        "k_scale": torch.ones(()), "output": torch.empty(3, 1024),
    }  # fmt: skip
    call = types.SimpleNamespace(bound=given, function=amx_mla.AMXMLAImpl.forward_mha)
    hand_patch.Lines(session).around(call, lambda: call.function(**given))
    found["amx"] = None, said[-1]


def main():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {}
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1)
        torch.set_default_dtype(torch.bfloat16)
        layers(found)
        amx(found)
    print(json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads are in no hurry


main()
