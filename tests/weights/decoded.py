"""What assay decodes a checkpoint to, and checkpoints to decode."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
ASSAY = os.environ.get("ASSAY_BINARY", str(ROOT / "build" / "assay"))


def decode(path: pathlib.Path, out: pathlib.Path, only: str = "") -> dict[str, np.ndarray]:
    """What assay makes of the checkpoint; findings (exit code 1) are the audit's business."""
    argv = [ASSAY, "weights", str(path), "--decode", str(out)] + (["--only", only] if only else [])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return load_file(out)


def audit(path: pathlib.Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON ({} when there is none), messages."""
    done = subprocess.run([ASSAY, "weights", "--json", str(path), *more], capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1, 3), done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def folder(path: pathlib.Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> pathlib.Path:
    path.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path
