"""assay finds the first wrong tensor in a running LLM.

Record the tensors of a run, read them back, compare two runs::

    with assay.trace("run-a", meta={"engine": "mine"}) as t:
        key = t.request(prompt_ids)
        t.record("layers.0.attn.q", q, step=0, row_requests=key, row_positions=positions)

    for event in assay.open("run-a"):
        print(event.site, event.norm, event.nonfinite)

    print(assay.diff("run-a", "run-b").first_bad)

One process writes one file; what was recorded survives a killed process. The fields are those of docs/fields.md, the
settings those of docs/settings.md; docs/python.md has the rest.
"""

from ._arguments import Run, request_key
from ._diff import Coverage, DiffResult, Finding, NearTie, SiteComparison, diff
from ._errors import BadInputError, Error, InternalError, MachineError, UsageError
from ._events import CoverageNote, Damage, Event, Events, Process, Request, Segment, Site, open
from ._settings import settings
from ._trace import BEFORE_INPLACE, IN_GRAPH, AssayWarning, Drops, Trace, current, record, trace

__all__ = [
    "BEFORE_INPLACE",
    "IN_GRAPH",
    "AssayWarning",
    "BadInputError",
    "Coverage",
    "CoverageNote",
    "Damage",
    "DiffResult",
    "Drops",
    "Error",
    "Event",
    "Events",
    "Finding",
    "InternalError",
    "MachineError",
    "NearTie",
    "Process",
    "Request",
    "Run",
    "Segment",
    "Site",
    "SiteComparison",
    "Trace",
    "UsageError",
    "current",
    "diff",
    "open",
    "record",
    "request_key",
    "settings",
    "trace",
    "version",
]


def version() -> str:
    """The version of the library in use, "0.1.0"."""
    from . import _library

    return str(_library.host().assay_version().decode())
