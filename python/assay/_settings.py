"""Settings: the same parser as the ASSAY* variables, reached through the C interface."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import byref, c_uint64

from . import _library

# ASSAY_OPEN_NO_ENVIRONMENT of assay.h.
NO_ENVIRONMENT = 1

# A setting's value: text in the grammar of docs/settings.md, a number, on or off, a path, or a list joined by commas.
Value = str | int | bool | os.PathLike[str] | Sequence[str | int]


def assignments(knobs: dict[str, Value | None]) -> list[str]:
    """{"level": "payload"} -> ["ASSAY_LEVEL=payload"]; None leaves a setting out. profile is the variable ASSAY.

    Values are not checked here: the parser does that, for all languages alike.
    """
    out = []
    for name, value in knobs.items():
        if value is None:
            continue
        variable = "ASSAY" if name == "profile" else "ASSAY_" + name.upper()
        if isinstance(value, bool):
            text = "on" if value else "off"
        elif isinstance(value, (str, int)):
            text = str(value)
        elif isinstance(value, os.PathLike):
            text = os.fspath(value)
        else:
            text = ",".join(str(v) for v in value)
        out.append(f"{variable}={text}")
    return out


def settings(*, environment: bool = True, **knobs: Value | None) -> dict[str, str]:
    """The settings of a recording in full, as variables: ``{"ASSAY": "mla", "ASSAY_LEVEL": "stats", ...}``.

    knobs: the variables without ASSAY_, in lower case (docs/settings.md): ``profile``, ``dir``, ``level``, ``include``,
    ``exclude``, ``layers``, ``ranks``, ``steps``, ``budget``, ``grids``, ``threads``, ``segment``, ``seed``, ``ring``,
    ``tokens``, ``strict``. They win over the ASSAY* variables of the process, which are not looked at with
    ``environment=False``. Usable as the environment of a child process.

    Raises UsageError: the variable, the column and what is expected there.
    """
    given = assignments(knobs)
    flags = 0 if environment else NO_ENVIRONMENT
    error = _library.CError()
    # The library says how much it needs; a second round is for lists of hundreds of patterns.
    size = c_uint64(4096)
    while True:
        buffer = ctypes.create_string_buffer(size.value)
        capacity = size.value
        code = _library.host().assay_settings_text(
            _library.strings(given), len(given), flags, buffer, byref(size), byref(error)
        )
        _library.check(code, error)
        if size.value <= capacity:
            break
    lines = buffer.value.decode("utf-8", "replace").splitlines()
    return dict(line.split("=", 1) for line in lines)
