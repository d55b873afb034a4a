"""A fault of the story's kind, put into vLLM from outside: a general plugin, which vLLM loads in every process.

At layer STORY_LAYER the decode step of MLA makes its result in a fresh tensor, where the contract says to fill `out`. What
attention gives for decoded rows is then whatever the buffer's memory held.
"""

import os

ENTRY = "[vllm.general_plugins]\nstory = decode_output_fault:install\n"
METADATA = "Metadata-Version: 2.1\nName: decode-output-fault\nVersion: 0\n"


def put(folder):
    """Makes the folder one that has this plugin as an installed package, for PYTHONPATH."""
    info = folder / "decode_output_fault-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY)
    (folder / "decode_output_fault.py").write_text(open(__file__).read())
    return folder


def install():
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    right = MLAAttention._v_up_proj
    if hasattr(right, "story"):  # plugins may be loaded more than once a process
        return

    def faulty(self, x, out):
        if f".layers.{os.environ['STORY_LAYER']}." not in f".{self.layer_name}.":
            return right(self, x, out)
        fresh = torch.empty_like(out)
        right(self, x, fresh)
        return fresh

    faulty.story = True
    MLAAttention._v_up_proj = faulty
