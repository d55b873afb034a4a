"""vLLM's own chunked-context prefill on the CPU, called without an engine: two chunks of a cached context and new tokens,
merged by merge_attn_states. No CPU backend of this version schedules it. Knows nothing of assay."""

import pathlib
import sys
import types

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonPrefillMetadata
from vllm.model_executor.layers.linear import ColumnParallelLinear

MODEL = pathlib.Path(__file__).resolve().parents[2] / "models" / "kjv-mla-10m"
HEADS, NOPE, ROPE, VALUE, LATENT, BLOCK = 4, 192, 64, 256, 512, 16
CONTEXT, CHUNK, NEW = 40, 32, 5


def context_chunk(index: int, start: int, end: int) -> "MLACommonPrefillMetadata.ContextChunk":
    n = end - start
    return MLACommonPrefillMetadata.ContextChunk(
        index=index,
        request_slice=slice(0, 1),
        token_slice=slice(0, NEW),
        continuation_token_end=NEW,
        is_continuation=start > 0,
        num_context_tokens=n,
        query_start_loc=torch.tensor([0, NEW]),
        max_query_len=NEW,
        cu_seq_lens=torch.tensor([0, n]),
        starts=torch.tensor([start]),
        max_seq_len=n,
        seq_lens=torch.tensor([n]),
        token_to_seq=torch.zeros(n, dtype=torch.int32),
        all_rows_active=True,
    )


def mla_layer(rendezvous: str, **options) -> tuple[VllmConfig, MLAAttention, ColumnParallelLinear]:
    """vLLM's layer outside an engine, its kv_b_proj of random weights; the process is a group of one by the file."""
    config = EngineArgs(model=str(MODEL), enforce_eager=True, max_model_len=512).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1, 1)
        kv_b = ColumnParallelLinear(LATENT, HEADS * (NOPE + VALUE), bias=False, params_dtype=torch.bfloat16)
        torch.nn.init.normal_(kv_b.weight, std=0.04)
        layer = MLAAttention(
            HEADS, (NOPE + ROPE) ** -0.5, NOPE, ROPE, VALUE, 128, LATENT, kv_b,
            cache_config=config.cache_config, prefix="model.layers.1.self_attn.attn", **options,
        )  # fmt: skip
    return config, layer, kv_b


def main() -> None:
    torch.manual_seed(1)
    config, layer, kv_b = mla_layer(sys.argv[1])
    with set_current_vllm_config(config):
        kv_b.quant_method.process_weights_after_loading(kv_b)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16)

    cache = random(8, BLOCK, LATENT + ROPE)
    context = MLACommonPrefillMetadata.ChunkedContextMetadata(
        context_lens=torch.tensor([CONTEXT]),
        workspace=random(CHUNK, LATENT + ROPE),
        chunks=[context_chunk(0, 0, CHUNK), context_chunk(1, CHUNK, CONTEXT)],
        context_lens_list=[CONTEXT],
        empty_token_slices=[],
    )
    prefill = MLACommonPrefillMetadata(
        block_table=torch.tensor([[5, 2, 7]], dtype=torch.int32),
        query_start_loc=torch.tensor([0, NEW]),
        max_query_len=NEW,
        chunked_context=context,
        q_data_type=torch.bfloat16,
        prefill_backend=layer.prefill_backend,
    )
    layer.prefill_backend.prepare_metadata(prefill)
    metadata = types.SimpleNamespace(
        num_actual_tokens=NEW, num_decodes=0, num_prefills=1, num_decode_tokens=0, prefill=prefill, decode=None
    )
    output = torch.zeros(NEW, HEADS * VALUE, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.forward_impl(
            random(NEW, HEADS, NOPE + ROPE), random(NEW, LATENT), random(NEW, 1, ROPE), cache, metadata, output=output
        )
    print("norm", output.float().norm().item())


if __name__ == "__main__":
    main()
