"""For tests of the built-in function, which must record what the long way records, whatever happens meanwhile.

The conftest of a folder whose tests import it puts this folder on the path.
"""

import pytest
import torch
from assay import _fast_call

# The statistics that do not depend on the way, to the last bit.
EXACT = ["count", "zero", "nan", "digest", "min", "max", "abs_max", "abs_max_index", "sum", "sum_sq"]


def needs_fast_call():
    if _fast_call.functions() is None:
        pytest.skip("this torch has no C exchange API of DLPack")


def check_segments(got, expected):
    """Of two events: the same rows of the same requests, with the same statistics."""
    assert len(got.segments) == len(expected.segments), got.site
    for a, b in zip(got.segments, expected.segments):
        for field in ["request", "first_position", "first_row", "n_rows", *EXACT, "row_l2", "head_l2"]:
            assert getattr(a, field) == getattr(b, field), (got.site, field, getattr(a, field), getattr(b, field))


class Meanwhile(torch.overrides.TorchFunctionMode):
    """Does something while a tensor is asked for its offset, as another thread may."""

    def __init__(self, then):
        super().__init__()
        self.then = then

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.storage_offset and self.then is not None:
            then, self.then = self.then, None
            then()
        return function(*args, **(kwargs or {}))
