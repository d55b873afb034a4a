"""A vllm of the wrong version: the modules the profile looks at, with symbols renamed or missing, and a model whose
quantised layer has no ``weight``. Written for the tests; nothing of it is vLLM's."""

FILES = {
    "vllm/__init__.py": "__version__ = '99.0'\n",
    "vllm/config.py": """
import enum, types

class CompilationMode(enum.Enum):
    NONE = 0

def get_current_vllm_config():
    return types.SimpleNamespace(compilation_config=types.SimpleNamespace(mode=CompilationMode.NONE))
""",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/gpu_model_runner.py": """
class GPUModelRunner:
    def _prepare_input(self, scheduler_output, num_scheduled_tokens):  # was _prepare_inputs
        return 7

    def execute_model(self, scheduler_output):
        return self._prepare_input(scheduler_output, [1])
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": "",
    "vllm/model_executor/model_loader/base_loader.py": """
import torch

def process_weights_after_loading(model, model_config, target_device):
    layer = model.model.layers[0].self_attn.o_proj
    del layer.weight_packed
    return 'processed'
""",
    "main.py": """
import types
import torch
import vllm
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.model_executor.model_loader import base_loader

class RowParallelLinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight_packed = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.uint8), requires_grad=False)
        self.weight_scale = torch.nn.Parameter(torch.ones(4, 1), requires_grad=False)
        self.quant_method = type("Int4LinearMethod", (), {})()

    def forward(self, x):
        return x, None

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.o_proj = RowParallelLinear()

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()

class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer()])

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()

model = Model()
print(base_loader.process_weights_after_loading(model, None, None))
print(GPUModelRunner().execute_model(types.SimpleNamespace(finished_req_ids=[])))
print(model.model.layers[0].self_attn.o_proj(torch.ones(3, 8))[0].sum().item())
""",
}
