"""The entry point ``vllm.general_plugins``, which vLLM calls in each of its processes.

The site hook of the installed package has attached before that; this is the way in where a process was started
without it (``python -S``, an embedded interpreter). It imports nothing when ASSAY is unset, and touches no device.
"""

from __future__ import annotations

import os


def register() -> None:
    """Attaches this process when ASSAY asks for it; any number of times."""
    if os.environ.get("ASSAY", "off") in ("", "0", "off"):
        return
    try:
        import assay.attach

        assay.attach.start()
    except Exception as problem:  # vLLM goes on whatever is wrong with us
        try:
            os.write(2, f"assay: cannot attach: {problem}; the program goes on without\n".encode())
        except OSError:
            pass
