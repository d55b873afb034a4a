"""Errors, one class a code of the C interface."""

from __future__ import annotations


class Error(Exception):
    """Anything that assay refuses or cannot do. ``code`` is the exit code the command line would give."""

    code = 5


class UsageError(Error, ValueError):
    """An argument, setting or tensor does not exist or does not fit; the message names it."""

    code = 2


class BadInputError(Error):
    """A trace is damaged, hostile or cannot be compared; the message names file and offset."""

    code = 3


class MachineError(Error, OSError):
    """The machine refused: disk full, budget used up, no permission, library not found."""

    code = 4


class InternalError(Error):
    """A fault of assay itself; please report it."""

    code = 5


# The codes of base/status.h; an unknown one is a fault of assay.
_BY_CODE: dict[int, type[Error]] = {2: UsageError, 3: BadInputError, 4: MachineError, 5: InternalError}


def from_code(code: int, message: str) -> Error:
    """The exception for a return code of the C interface that is not 0."""
    return _BY_CODE.get(code, InternalError)(message)
