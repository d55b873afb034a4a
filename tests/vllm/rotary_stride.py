"""The guilty call of docs/wild-one.md by itself: vLLM's CPU kernel on the views that its MLA layer gives it."""
import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform

current_platform.import_kernels()
T, H, nope, rope = 12, 4, 192, 64
angles = torch.outer(torch.arange(32.0), 10000 ** (-torch.arange(0, rope, 2.0) / rope))
table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
q = torch.randn(T, H, nope + rope, dtype=torch.bfloat16)[..., nope:]  # strides 1024, 256, 1
k = torch.randn(T, 704, dtype=torch.bfloat16)[:, 640:].unsqueeze(1)  # strides 704, 64, 1
positions, before = torch.arange(T), q.clone()
right = RotaryEmbedding.forward_static(positions, q.clone(), k.clone(), rope, rope, table, False)
torch.ops._C.rotary_embedding(positions, q, k, rope, table, False, 0, False)  # in place
wrong = [((got - want).abs() > 0.1).any(-1).int() for got, want in zip((q, k), right)]
print("heads turned right, by token:", (1 - wrong[0]).sum(1).tolist(), "of", H)
print("heads left as they were:", (q == before).all(-1).sum().item(), "of", T * H)
print("keys turned right:", (1 - wrong[1]).sum().item(), "of", T)
