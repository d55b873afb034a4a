"""Output buffers that a callable leaves unwritten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .probes import Probe

if TYPE_CHECKING:
    from .session import Session


def audit(session: Session, target: str, output: str, **options: Any) -> Probe:
    raise NotImplementedError
