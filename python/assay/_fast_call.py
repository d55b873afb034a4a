"""Built-in functions that record torch tensors: what PreparedSite calls, and the wrappers of modules.

They are C functions of libassay.so (src/runtime/python_call.h), given to Python by the stable ABI without anything being
compiled against Python. Through ctypes, with the tensor's attributes read in Python, a call costs several times as much.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, py_object
from typing import Any, NamedTuple

from . import _library

Record = Callable[..., Any]
"""(address of a CSite, tensor, address of CRows or 0), or with 0 and the address of a CStep or 0 at the end: True when
recorded, None when the site's result and error say why not, False when nothing was done: it is not a tensor that the site
takes."""

Leave = Callable[[int, Any, Any], bool]
"""(number in the table of modules, module, result): True when the result's tensors were given to their sites, False when
nothing was done."""


Group = Callable[..., bool]
"""(address of a CGroup, address of a CStep, tensors): True when the group's views of them were given to their sites,
False when nothing was done."""

Observe = Callable[[list[Any], str], None]
"""(tensors, text): takes the shortcut of that text, or calls the function given to set_observers()."""

BeforeCall = Callable[[int, tuple[Any, ...], dict[str, Any]], bool]
"""(address of a CCallable, arguments of a call): True when what is to be recorded before it was recorded."""

AfterCall = Callable[[int, tuple[Any, ...], dict[str, Any], Any], bool]
"""The same with the call's result, behind it."""


class Functions(NamedTuple):
    """Built-in functions, and the type that they were made for."""
    record: Record
    leave: Leave
    group: Group
    observe: Observe
    before: BeforeCall
    after: AfterCall
    type: type[Any]  # of the tensors that they take; no subclass


CODES = {
    "torch.bfloat16": (4, 16),
    "torch.float16": (2, 16),
    "torch.float32": (2, 32),
    "torch.float64": (2, 64),
    "torch.int64": (0, 64),
    "torch.int32": (0, 32),
    "torch.bool": (6, 8),
}
"""DLPack's type code and bits of the types that are taken."""

LARGEST = 262144
"""Elements of a tensor that is taken."""


class CRows(ctypes.Structure):
    """PythonRows of src/runtime/python_call.h: the rows of a step."""
    _fields_ = [
        ("runs", POINTER(_library.CRowRun)),
        ("n_runs", c_uint64),
        ("step", c_int64),
        ("phase", c_uint32),
        ("compute_dtype", c_uint32),
    ]


class CSite(ctypes.Structure):
    """PythonSite: one site, and the layout that it takes (shape NULL: any)."""
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
        ("row_axis", c_int32),
        ("error", _library.CError),
    ]


class CStep(ctypes.Structure):
    """PythonStep: rows for tensors whose axis 0 has n_rows, and rest for others."""
    _fields_ = [("n_rows", c_int64), ("rows", c_void_p), ("rest", c_void_p)]


class CMember(ctypes.Structure):
    _fields_ = [
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("reserved", c_uint16),
    ]


class CView(ctypes.Structure):
    _fields_ = [
        ("site", POINTER(CSite)),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("first", c_int64),
        ("ndim", c_int32),
        ("member", c_uint32),
    ]


class CGroup(ctypes.Structure):
    _fields_ = [
        ("members", POINTER(CMember)),
        ("views", POINTER(CView)),
        ("n_members", c_uint32),
        ("n_views", c_uint32),
        ("by_row", c_uint64),
    ]


class CNow(ctypes.Structure):
    """PythonNow: what all probes share; busy is the address of a list."""
    _fields_ = [("on", c_uint64), ("step", c_void_p), ("busy", c_void_p)]


class CPart(ctypes.Structure):
    """PythonPart: one member of a module's result."""
    _fields_ = [("key", c_void_p), ("type", c_void_p), ("site", c_void_p)]


class CModule(ctypes.Structure):
    """PythonModule: a module whose results all look alike."""
    _fields_ = [
        ("module", c_void_p),
        ("result_type", c_void_p),
        ("parts", POINTER(CPart)),
        ("n_parts", c_uint32),
        ("is_dict", c_uint32),
        ("now", POINTER(CNow)),
        ("fired", c_uint64),
        ("group", POINTER(CGroup)),
    ]


class CPlace(ctypes.Structure):
    """PythonPlace: where a call has a value."""
    _fields_ = [("argument", c_int32), ("member", c_int32), ("name", c_void_p)]


class CShortcut(ctypes.Structure):
    """PythonShortcut: what takes the place of a callback."""
    _fields_ = [
        ("now", POINTER(CNow)),
        ("group", POINTER(CGroup)),
        ("places", POINTER(CPlace)),
        ("n_places", c_uint32),
        ("n_nothing", c_uint32),
        ("fired", c_uint64),
    ]


class CCallable(ctypes.Structure):
    """PythonCallable: shortcuts by the first argument of a call."""
    _fields_ = [("owners", c_void_p), ("before", c_void_p), ("after", c_void_p), ("n", c_uint64)]


# Members of PythonFunctions by the function of Python's C API that fills them; all are in the stable ABI.
_PYTHON = {
    "clear_error": "PyErr_Clear",
    "number": "PyLong_AsLongLong",
    "add_reference": "Py_IncRef",
    "drop_reference": "Py_DecRef",
    "call": "PyObject_CallFunctionObjArgs",
    "list_size": "PyList_Size",
    "list_item": "PyList_GetItem",
    "tuple_size": "PyTuple_Size",
    "tuple_item": "PyTuple_GetItem",
    "dict_next": "PyDict_Next",
    "dict_item": "PyDict_GetItem",
}


class _CFunctions(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in (
            *(*_PYTHON, "read_tensor", "yes", "no", "none", "tensor_type", "storage_offset", "is_neg"),
            *("storage_offset_of", "handle_at"),
        )
    ]


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


def never(site: int, tensor: Any, rows: int, step: int = 0) -> bool:
    """Stands in for the built-in function where there is none."""
    return False


def never_before(address: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The same for BeforeCall."""
    return False


def never_after(address: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """The same for AfterCall."""
    return False


_METH_FASTCALL = 0x80
_lock = threading.Lock()
_made: Functions | None = None
_looked = False
_keep: list[object] = []  # what C keeps addresses of


def _address(function: str) -> int | None:
    return ctypes.cast(getattr(ctypes.pythonapi, function), c_void_p).value


def _storage_offset_of(tensor_type: type[Any]) -> tuple[int, int] | None:
    """Address of the C function of torch that gives a tensor's offset in its storage, and bytes from where an object of
    torch.Tensor begins to what the function takes. Both are tried; None where it is not so."""
    try:
        loaded = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        function = loaded.aoti_torch_get_storage_offset
        function.argtypes, function.restype = [c_void_p, POINTER(c_int64)], c_int32
        whole: Any = tensor_type([1.0, 2.0])  # in host memory, whatever the default device
        tensors = whole, whole[1:]
        word = ctypes.sizeof(c_void_p)
        places = range(2 * word, 5 * word, word)  # behind reference count and type
        at = next(at for at in places if all(c_void_p.from_address(id(t) + at).value == t._cdata for t in tensors))
        for tensor in tensors:
            offset = c_int64(-1)
            if function(id(tensor) + at, ctypes.byref(offset)) != 0 or offset.value != tensor.storage_offset():
                return None
    except Exception:  # another torch
        return None
    _keep.append(loaded)
    address = ctypes.cast(function, c_void_p).value
    return None if address is None else (address, at)


def _make(tensor_type: type[Any]) -> Functions | None:
    # Addresses of objects, and the lock that guards them, are CPython's alone.
    """None where the functions cannot be used. Objects of Python are handed over by their address (id), which is
    what CPython's C API takes.
    """
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
    offset, is_neg = tensor_type.storage_offset, tensor_type.is_neg
    offset_function, handle_at = _storage_offset_of(tensor_type) or (None, 0)
    functions = _CFunctions(
        **{name: _address(function) for name, function in _PYTHON.items()},
        read_tensor=exchange.read_tensor,
        yes=id(True),
        no=id(False),
        none=id(None),
        tensor_type=id(tensor_type),
        storage_offset=id(offset),
        is_neg=id(is_neg),
        storage_offset_of=offset_function,
        handle_at=handle_at,
    )
    library = _library.host()
    library.assay_python_functions(ctypes.byref(functions))
    new = ctypes.PYFUNCTYPE(py_object, c_void_p, c_void_p, c_void_p)(("PyCFunction_NewEx", python))

    def built_in(name: bytes, function: Any) -> Any:
        method = _CMethod(name, ctypes.cast(function, c_void_p), _METH_FASTCALL, None)
        _keep.append(method)
        return new(ctypes.addressof(method), None, None)

    _keep.extend([functions, tensor_type, offset, is_neg])
    return Functions(
        built_in(b"assay_record", library.assay_python_record),
        built_in(b"assay_leave", library.assay_python_leave),
        built_in(b"assay_group", library.assay_python_group),
        built_in(b"assay_observe", library.assay_python_observe),
        built_in(b"assay_before", library.assay_python_before),
        built_in(b"assay_after", library.assay_python_after),
        tensor_type,
    )


def functions() -> Functions | None:
    """None where there are none: torch is not imported yet, or is older than 2.10; a Python without its lock.

    Looked for once torch is imported; the outcome then holds for the process.
    """
    global _made, _looked
    if not _looked:
        with _lock:
            kind = getattr(sys.modules.get("torch"), "Tensor", None)
            if not _looked and kind is not None:
                _made, _looked = _make(kind), True
    return _made


def set_observers(shortcuts: dict[str, int], otherwise: Callable[[list[Any], str], None]) -> Observe | None:
    """What an operator in compiled graphs calls: the address of a CShortcut by text, which it looks up each time, and what
    it calls where there is none. To be called once; None without built-in functions."""
    made = functions()
    if made is None:
        return None
    _keep.extend([shortcuts, otherwise])
    _library.host().assay_python_observers(id(shortcuts), id(otherwise))
    return made.observe


class ModuleTable:
    """The modules that assay_python_leave finds by number; one a process.

    Python's lock guards it: C reads it with the lock held.
    """

    def __init__(self) -> None:
        self._table: Any = (c_void_p * 0)()

    def set(self, number: int, module: CModule | None) -> None:
        """The module has to be kept alive until its place is given to another.

        A table that is too short is replaced by one of twice the length; C is told before the old one goes.
        """
        if number >= len(self._table):
            if module is None:
                return
            table = (c_void_p * (2 * number + 64))(*self._table)
            _library.host().assay_python_modules(table, len(table))
            self._table = table
        self._table[number] = None if module is None else ctypes.addressof(module)

    def clear(self) -> None:
        ctypes.memset(self._table, 0, ctypes.sizeof(self._table))
