"""Finds and declares the two shared libraries. The structs mirror include/assay/assay.h field by field."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ._errors import InternalError, MachineError, UsageError, from_code

ABI_VERSION = 1


class CError(ctypes.Structure):
    """assay_error. The library ends the message with a zero byte and cuts what does not fit."""

    _fields_ = [("message", c_char * 1024)]


class CPair(ctypes.Structure):
    """assay_pair: key and value in UTF-8, copied by the library."""

    _fields_ = [("key", c_char_p), ("value", c_char_p)]


class CRowRun(ctypes.Structure):
    """assay_row_run: consecutive rows of one request at consecutive positions, or of padding.

    Rows [first_row, first_row + n_rows) along the row axis; padding 1: rows of no request, whose positions do not
    count.
    """

    _fields_ = [
        ("request", c_uint64),
        ("first_row", c_int64),
        ("n_rows", c_int64),
        ("first_position", c_int64),
        ("padding", c_uint32),
        ("reserved", c_uint32),
    ]


class COptions(ctypes.Structure):
    """assay_options. struct_size tells the library which version of the struct its caller knows.

    Settings are "NAME=value" texts, which win over the environment. rank -1 and world_size 0: not said. Copied by the
    library.
    """

    _fields_ = [
        ("struct_size", c_uint64),
        ("settings", POINTER(c_char_p)),
        ("n_settings", c_uint64),
        ("flags", c_uint32),
        ("rank", c_int32),
        ("world_size", c_int32),
        ("reserved", c_uint32),
        ("command", POINTER(c_char_p)),
        ("n_command", c_uint64),
        ("meta", POINTER(CPair)),
        ("n_meta", c_uint64),
    ]


class CSiteInfo(ctypes.Structure):
    """assay_site_info: a name that is said once, for events that refer to it by number."""

    _fields_ = [("struct_size", c_uint64), ("name", c_char_p), ("engine_name", c_char_p), ("axes", c_char_p)]


class CEvent(ctypes.Structure):
    """assay_event: one observation. What it points at must live until assay_record returns.

    Extents and strides are in elements, positions in tokens; BLANK_EVENT has the values of "not said".
    """

    _fields_ = [
        ("struct_size", c_uint64),
        ("site", c_int64),
        ("name", c_char_p),
        ("engine_name", c_char_p),
        ("axes", c_char_p),
        ("layer", c_int32),
        ("rank", c_int32),
        ("step", c_int64),
        ("phase", c_uint32),
        ("flags", c_uint32),
        ("stream", c_uint64),
        ("data", c_void_p),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("offset", c_int64),
        ("ndim", c_int32),
        ("dtype", c_uint32),
        ("compute_dtype", c_uint32),
        ("row_axis", c_int32),
        ("head_axis", c_int32),
        ("reserved", c_uint32),
        ("base_address", c_uint64),
        ("runs", POINTER(CRowRun)),
        ("n_runs", c_uint64),
        ("row_requests", c_void_p),
        ("row_positions", c_void_p),
        ("n_rows", c_uint64),
        ("shard_index", c_int32),
        ("shard_count", c_int32),
        ("shard_col_offset", c_int64),
        ("shard_full_cols", c_int64),
        ("meta", POINTER(CPair)),
        ("n_meta", c_uint64),
    ]


class CRequest(ctypes.Structure):
    """assay_request. A key of 0 asks for the key of tokens and ordinal."""

    _fields_ = [
        ("struct_size", c_uint64),
        ("key", c_uint64),
        ("tokens", c_void_p),
        ("n_tokens", c_uint64),
        ("ordinal", c_int64),
        ("engine_id", c_char_p),
    ]


class CDropCounts(ctypes.Structure):
    """assay_drop_counts: observations that were not recorded, by reason, and those that were.

    All are counts of observations.
    """

    _fields_ = [
        ("struct_size", c_uint64),
        ("byte_cap", c_uint64),
        ("disk_full", c_uint64),
        ("payload_budget", c_uint64),
        ("internal", c_uint64),
        ("recorded", c_uint64),
    ]


# Events with nothing said; copied for each record.
BLANK_EVENT = CEvent(
    struct_size=ctypes.sizeof(CEvent),
    site=-1,
    layer=-1,
    rank=-1,
    step=-1,
    row_axis=-1,
    head_axis=-1,
    shard_count=1,
)

_ERROR = POINTER(CError)
_TRACE = c_void_p
# Result and arguments of each function: without them ctypes would cut pointers to 32 bits.
_HOST_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "assay_version": (c_char_p, []),
    "assay_abi_version": (c_uint32, []),
    "assay_open": (c_int, [POINTER(COptions), POINTER(_TRACE), _ERROR]),
    "assay_close": (c_int, [POINTER(_TRACE), _ERROR]),
    "assay_arm": (c_int, [_TRACE, c_int32, _ERROR]),
    "assay_add_site": (c_int, [_TRACE, POINTER(CSiteInfo), POINTER(c_uint32), _ERROR]),
    "assay_wants": (c_int, [_TRACE, c_uint32, c_int32, c_int64]),
    "assay_wants_name": (c_int, [_TRACE, c_char_p, c_int32, c_int64]),
    "assay_record": (c_int, [_TRACE, POINTER(CEvent), _ERROR]),
    "assay_request_key": (c_uint64, [c_void_p, c_uint64, c_int64]),
    "assay_add_request": (c_int, [_TRACE, POINTER(CRequest), POINTER(c_uint64), _ERROR]),
    "assay_coverage": (c_int, [_TRACE, c_char_p, c_char_p, c_uint64, c_char_p, _ERROR]),
    "assay_set_meta": (c_int, [_TRACE, c_char_p, c_char_p, _ERROR]),
    "assay_trigger": (c_int, [_TRACE, c_char_p, _ERROR]),
    "assay_flush": (c_int, [_TRACE, _ERROR]),
    "assay_drops": (c_int, [_TRACE, POINTER(CDropCounts), _ERROR]),
    "assay_dir": (c_char_p, [_TRACE]),
    "assay_path": (c_char_p, [_TRACE]),
    "assay_settings_text": (c_int, [POINTER(c_char_p), c_uint64, c_uint32, c_void_p, POINTER(c_uint64), _ERROR]),
    "assay_dtype_name": (c_char_p, [c_uint32]),
    "assay_python_functions": (None, [c_void_p]),  # not in assay.h: _fast_call.py
    "assay_python_lets_through": (c_int32, [c_void_p, c_char_p]),
    "assay_python_modules": (None, [c_void_p, c_int64]),
    "assay_python_observers": (None, [c_void_p, c_void_p]),
}
_READER = c_void_p
_TEXT = POINTER(c_void_p)  # char**, kept as an address so that it can be freed
_OFFLINE_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "assay_reader_open": (c_int, [c_char_p, POINTER(_READER), _ERROR]),
    "assay_reader_close": (None, [_READER]),
    "assay_reader_count": (c_uint64, [_READER]),
    "assay_reader_describe": (c_int, [_READER, _TEXT, _ERROR]),
    "assay_reader_event": (c_int, [_READER, c_uint64, _TEXT, _ERROR]),
    "assay_reader_payload": (c_int, [_READER, c_uint64, POINTER(c_void_p), POINTER(c_uint64), _ERROR]),
    "assay_reader_stream": (c_int, [_READER, c_void_p, _ERROR]),
    "assay_diff_traces": (c_int, [_READER, _READER, c_char_p, c_char_p, c_int32, _TEXT, POINTER(c_int32), _ERROR]),
    "assay_string_free": (None, [c_void_p]),
}


def _folders() -> list[Path]:
    """Where the libraries may lie: ASSAY_LIBRARY (a folder, or libassay.so itself), the installed package, the build
    folder of a source checkout."""
    named = os.environ.get("ASSAY_LIBRARY")
    if named:
        path = Path(named)
        return [path if path.is_dir() else path.parent]
    here = Path(__file__).resolve().parent
    return [here / "lib", here.parent.parent / "build"]


def _named() -> str:
    """What to do about ASSAY_LIBRARY, where it decided; else nothing."""
    named = os.environ.get("ASSAY_LIBRARY")
    if not named:
        return ""
    return f"; ASSAY_LIBRARY={named} says to look there: name the folder that holds libassay.so, or unset it"


def _load(file: str, functions: dict[str, tuple[Any, list[Any]]]) -> ctypes.CDLL:
    tried = []
    for folder in _folders():
        path = folder / file
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise MachineError(f"cannot load {path}: {error}" + _named()) from None
            for name, (result, arguments) in functions.items():
                function = getattr(library, name, None)
                if function is None:
                    raise MachineError(f"{path} has no {name}: it is of another version than this package" + _named())
                function.restype = result
                function.argtypes = arguments
            return library
        tried.append(str(path))
    if _named():
        raise MachineError(f"{file} not found at {tried[0]}" + _named())
    raise MachineError(
        f"{file} not found (looked at {', '.join(tried)}); install the package with pip, run `make build` in the "
        "checkout, or set ASSAY_LIBRARY to the folder that holds it"
    )


# Loaded at first use: `import assay` must not fail where the library is not built yet.
_host: ctypes.CDLL | None = None
_offline: ctypes.CDLL | None = None


def host() -> ctypes.CDLL:
    """libassay.so, loaded at the first use.

    Raises MachineError when it cannot be found or loaded, or lacks a function of this package, as most of another
    version do; InternalError when it has all of them and says that its interface is older.
    """
    global _host
    if _host is None:
        library = _load("libassay.so", _HOST_FUNCTIONS)
        if library.assay_abi_version() < ABI_VERSION:
            raise InternalError(f"libassay.so {library.assay_version().decode()} is older than this package")
        _host = library
    return _host


def offline() -> ctypes.CDLL:
    """libassay_offline.so, loaded at the first use.

    Apart from libassay.so, since it needs more than libc, and hosts that only record never load it.
    """
    global _offline
    if _offline is None:
        _offline = _load("libassay_offline.so", _OFFLINE_FUNCTIONS)
    return _offline


def check(code: int, error: CError) -> None:
    """Raises the exception for a return code that is not 0."""
    if code != 0:
        raise from_code(code, error.message.decode("utf-8", "replace"))


def c_text(what: str, text: str) -> bytes:
    """UTF-8 for C, which would cut the text at a NUL in silence.

    ``what`` names the argument in the message. Raises UsageError.
    """
    if not isinstance(text, str):
        raise UsageError(f"{what} is {text!r}; expected text")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} {text!r} is not valid Unicode") from None
    if b"\0" in encoded:
        raise UsageError(f"{what} {text!r} has a NUL in it")
    return encoded


def printable_text(text: str) -> bytes:
    """As c_text() for what comes from anywhere: what C does not take is written in escapes."""
    return text.encode(errors="backslashreplace").replace(b"\0", b"\\0")


def strings(values: list[str]) -> Any:
    """An array of C strings; keep it alive during the call."""
    return (c_char_p * len(values))(*[c_text("the setting", v) for v in values])


def pairs(values: dict[str, object]) -> Any:
    """An array of key and value; values are turned into text. Keep it alive during the call."""
    return (CPair * len(values))(*[CPair(c_text("key", k), c_text(k, str(v))) for k, v in values.items()])


def take_text(address: c_void_p) -> str:
    """The text that a function of the offline library handed out, which is freed."""
    if not address.value:
        return ""
    try:
        return ctypes.string_at(address.value).decode("utf-8", "replace")
    finally:
        offline().assay_string_free(address)
