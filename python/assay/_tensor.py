"""Where the elements of a foreign tensor lie: torch, NumPy, DLPack and the buffer protocol, without a copy."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_ssize_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, NamedTuple

from ._dtypes import ALIASES, BUFFER, DLPACK, DTYPES
from ._errors import UsageError


class Where(NamedTuple):
    """A strided view in this process's memory. ``keep`` must stay alive as long as the view is used."""

    data: int  # address of the storage
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # elements; None: row-major without gaps
    offset: int  # of the first element from data, elements
    keep: object


def locate(tensor: Any) -> Where:
    """Describes the memory of a tensor.

    Raises UsageError for a tensor on a device, a dtype that assay does not know, or an object that is none of the four
    kinds. Nothing is copied and nothing is changed; requires_grad, views, transposed and broadcast tensors are fine.

    ``shape`` and ``strides`` count elements also for types of four bits.
    """
    kind = type(tensor)
    # Chosen once a type.
    reader = _READERS.get(kind)
    if reader is None:
        reader = _READERS[kind] = _choose(kind, tensor)
    where: Where = reader(tensor)
    return where


def _choose(kind: type, tensor: Any) -> Any:
    # Never imported here: an object of a library that is not loaded cannot exist.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _from_torch
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _from_numpy
    if numpy is not None and isinstance(tensor, numpy.generic):
        return lambda scalar: _from_numpy(numpy.asarray(scalar))
    if hasattr(kind, "__dlpack__"):
        return _from_dlpack
    return _from_buffer


_READERS: dict[type, Any] = {}


# ---- torch

_torch_dtypes: dict[Any, int] = {}


def _from_torch(tensor: Any) -> Where:
    if not tensor.is_cpu:
        raise UsageError(on_device(str(tensor.device)))
    number = torch_dtype_number(tensor.dtype)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()  # its memory holds the negated values
    try:
        storage = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(f"a torch tensor without memory ({type(tensor).__name__}): {error}") from None
    shape = tuple(tensor.shape)
    strides = tensor.stride()
    offset = tensor.storage_offset()
    if number == DTYPES["f4_e2m1"][0]:  # torch counts bytes of two elements
        if not shape or strides[-1] != 1:
            raise UsageError("a float4_e2m1fn_x2 tensor must be contiguous in its last axis")
        # So shape and strides are doubled to count elements: the last axis in length, the others in stride.
        shape = (*shape[:-1], 2 * shape[-1])
        strides = (*(2 * s for s in strides[:-1]), 1)
        offset *= 2
    if storage == 0 and 0 not in shape:
        raise UsageError(f"a torch tensor without memory ({type(tensor).__name__})")
    # The storage's address rather than the first element's: events of one buffer share it, whatever view they record.
    return Where(storage, number, shape, strides, offset, tensor)


def torch_dtype_number(dtype: Any) -> int:
    """The number of a torch.dtype; UsageError for one that assay does not measure."""
    known = _torch_dtypes.get(dtype)
    if known is not None:
        return known
    name = ALIASES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise UsageError(f"{dtype} is not a dtype that assay measures ({', '.join(DTYPES)})")
    _torch_dtypes[dtype] = DTYPES[name][0]
    return _torch_dtypes[dtype]


# ---- NumPy

_numpy_dtypes: dict[Any, tuple[int, int]] = {}  # dtype -> number, itemsize


def _from_numpy(array: Any) -> Where:
    known = _numpy_dtypes.get(array.dtype) or _numpy_dtype(array.dtype)
    number, itemsize = known
    # One look-up gives address, shape and strides; strides are None for C order.
    interface = array.__array_interface__
    strides = interface["strides"]
    if strides is not None:
        strides = _in_elements(strides, itemsize)
    return Where(interface["data"][0], number, interface["shape"], strides, 0, array)


def _numpy_dtype(dtype: Any) -> tuple[int, int]:
    name = ALIASES.get(dtype.name)
    if name is None:
        hint = "; it holds one element a byte, pack two and pass float4 through torch" if "4_" in dtype.name else ""
        raise UsageError(f"NumPy's {dtype.name} is not a dtype that assay measures ({', '.join(DTYPES)}){hint}")
    if dtype.byteorder not in "=|" and dtype.byteorder != ("<" if sys.byteorder == "little" else ">"):
        raise UsageError(f"a NumPy array in foreign byte order ({dtype.str}); convert it with .astype")
    _numpy_dtypes[dtype] = (DTYPES[name][0], dtype.itemsize)
    return _numpy_dtypes[dtype]


def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if any(s % itemsize for s in strides):
        raise UsageError(f"strides {strides} are not multiples of the element size {itemsize}")
    return tuple(s // itemsize for s in strides)


# ---- DLPack


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_CPU_DEVICES = {1, 3, 11}  # host memory, and host memory pinned by CUDA or ROCm
_DEVICE_NAMES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda (managed)", 14: "oneapi"}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, c_char_p]


def on_device(device: str) -> str:
    """Why a tensor on a device is refused."""
    return f"the tensor is on {device}; this build reads host memory only: pass tensor.cpu()"


def _from_dlpack(tensor: Any) -> Where:
    if hasattr(tensor, "__dlpack_device__"):
        device, index = tensor.__dlpack_device__()
        if int(device) not in _CPU_DEVICES:
            raise UsageError(on_device(f"{_DEVICE_NAMES.get(int(device), f'DLPack device {int(device)}')}:{index}"))
    # The capsule is kept unconsumed: its destructor gives the tensor back when the view is no longer needed.
    capsule = tensor.__dlpack__()
    t = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if t.device_type not in _CPU_DEVICES:
        raise UsageError(on_device(f"DLPack device {t.device_type}:{t.device_id}"))
    name = DLPACK.get((t.code, t.bits))
    if name is None or t.lanes != 1:
        raise UsageError(
            f"DLPack type (code {t.code}, {t.bits} bits, {t.lanes} lanes) is not a dtype that assay measures"
        )
    number, bits = DTYPES[name]
    shape = tuple(t.shape[: t.ndim]) if t.ndim else ()
    strides = tuple(t.strides[: t.ndim]) if t.strides and t.ndim else None
    # DLPack does not say where a storage begins, so the view's own start stands for it.
    data = (t.data or 0) + t.byte_offset
    return Where(data, number, shape, strides, 0, (capsule, tensor))


# ---- buffer protocol


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython; releases the exporter when it goes."""
    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_char_p),
        ("shape", POINTER(c_ssize_t)),
        ("strides", POINTER(c_ssize_t)),
        ("suboffsets", POINTER(c_ssize_t)),
        ("internal", c_void_p),
    ]

    def __del__(self) -> None:
        if self.obj:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self))


_PyBUF_FULL_RO = 0x011C  # indirect, strides, format; not writable
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.restype = c_int
_get_buffer.argtypes = [ctypes.py_object, POINTER(_PyBuffer), c_int]


def _from_buffer(tensor: Any) -> Where:
    view = _PyBuffer()
    try:
        _get_buffer(tensor, ctypes.byref(view), _PyBUF_FULL_RO)
    except (TypeError, BufferError, ValueError):
        raise UsageError(
            f"{type(tensor).__name__} is no tensor: expected torch, NumPy, DLPack or the buffer protocol"
        ) from None
    form = (view.format or b"B").decode().lstrip("@=<" if sys.byteorder == "little" else "@=>")
    name = BUFFER.get(form)
    if name is None or view.itemsize * 8 != DTYPES[name][1] or view.suboffsets:
        raise UsageError(f"a buffer of format {form!r} is not a dtype that assay measures")
    # Exporters may leave out what a gapless array does not need, even when asked (ctypes leaves out the strides).
    shape: tuple[int, ...] = ()
    if view.ndim:
        shape = tuple(view.shape[: view.ndim]) if view.shape else (view.len // view.itemsize,)
    strides = _in_elements(tuple(view.strides[: view.ndim]), view.itemsize) if view.ndim and view.strides else None
    return Where(view.buf or 0, DTYPES[name][0], shape, strides, 0, view)
