"""One built-in function that records a torch tensor: what PreparedSite calls once a site's layout is known.

It is a C function of libassay.so (src/runtime/python_call.h), given to Python by the stable ABI without anything being
compiled against Python. Through ctypes, with the tensor's attributes read in Python, a call costs several times as much.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from typing import Any

from . import _library

Record = Callable[[int, Any, int, int], Any]
"""(address of a CSite, tensor, storage offset in elements, address of CRows or 0): True when recorded, None when the
site's result and error say why not, False when nothing was done: the tensor's layout is not the site's."""

LARGEST = 32768
"""Elements of a tensor that may be measured with Python's lock held: about as long as a hand-over of the lock takes."""

CODES = {"torch.bfloat16": (4, 16), "torch.float16": (2, 16), "torch.float32": (2, 32)}
"""DLPack's type code and bits."""


class CRows(ctypes.Structure):
    _fields_ = [
        ("runs", POINTER(_library.CRowRun)),
        ("n_runs", c_uint64),
        ("step", c_int64),
        ("phase", c_uint32),
        ("compute_dtype", c_uint32),
    ]


class CSite(ctypes.Structure):
    _fields_ = [
        ("trace", c_void_p),
        ("event", POINTER(_library.CEvent)),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("ready", c_uint16),
        ("result", c_int32),
        ("reserved", c_uint32),
        ("error", _library.CError),
    ]


class _CFunctions(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("clear_error", "number", "add_reference", "read_tensor", "yes", "no", "none")]


class _CMethod(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = [("name", c_char_p), ("function", c_void_p), ("flags", c_int), ("doc", c_char_p)]


class _CExchange(ctypes.Structure):
    """DLPackExchangeAPI, whose header stays as it is in all versions."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("previous", c_void_p),
        ("allocate", c_void_p),
        ("managed_from", c_void_p),
        ("managed_to", c_void_p),
        ("read_tensor", c_void_p),
        ("stream", c_void_p),
    ]


class Nothing:
    """No tensor is of this type."""


def never(site: int, tensor: Any, offset: int, rows: int) -> bool:
    return False


_METH_FASTCALL = 0x80
_lock = threading.Lock()
_made: tuple[Record, type[Any]] | None = None
_keep: list[object] = []  # what C keeps addresses of


def _address(function: str) -> int | None:
    return ctypes.cast(getattr(ctypes.pythonapi, function), c_void_p).value


def _make(tensor_type: type[Any]) -> tuple[Record, type[Any]] | None:
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    if capsule is None:  # torch before 2.10
        return None
    python = ctypes.pythonapi
    pointer = ctypes.PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", python))
    exchange = _CExchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    if exchange.major != 1 or not exchange.read_tensor:
        return None
    functions = _CFunctions(
        clear_error=_address("PyErr_Clear"),
        number=_address("PyLong_AsLongLong"),
        add_reference=_address("Py_IncRef"),
        read_tensor=exchange.read_tensor,
        yes=id(True),
        no=id(False),
        none=id(None),
    )
    library = _library.host()
    method = _CMethod(b"assay_record", ctypes.cast(library.assay_python_record, c_void_p), _METH_FASTCALL, None)
    library.assay_python_functions(ctypes.byref(functions))
    _keep.extend([functions, method])
    new = ctypes.PYFUNCTYPE(py_object, c_void_p, c_void_p, c_void_p)(("PyCFunction_NewEx", python))
    return new(ctypes.addressof(method), None, None), tensor_type


def of(tensor: object) -> tuple[Record, type[Any]] | None:
    """The function, and the type of tensors that it takes (no subclass); None where there is none of it: torch before
    2.10, a Python without its lock. tensor: of torch."""
    global _made
    if _made is None:
        with _lock:
            if _made is None:
                torch = sys.modules.get("torch")
                if torch is not None and isinstance(tensor, torch.Tensor):
                    _made = _make(torch.Tensor) or (never, Nothing)
    return None if _made is None or _made[1] is Nothing else _made
