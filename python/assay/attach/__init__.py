"""Attaching to a running Python program, with no edited file (docs/attach.md).

start() is called once a process by the site hook when ASSAY is set: by the installed package's .pth file, or by
`assay run -- python ...` without installation. It imports no framework; profiles are loaded when theirs is imported.
"""

from __future__ import annotations

import atexit

from .calls import Call
from .import_hook import ImportHook
from .modules import Modules
from .probes import Probe
from .rows import Rows
from .session import Session

__all__ = ["Call", "Modules", "Probe", "Rows", "Session", "session", "start"]

_session: Session | None = None


def start() -> ImportHook:
    """Makes this process's session, once, and gives its import hook. Raises Error when the settings are wrong."""
    global _session
    if _session is None:
        _session = Session()
        atexit.register(_session.finish)
        _session.start()
    return _session.hook


def session() -> Session | None:
    """This process's session, or None when nothing is attached."""
    return _session
