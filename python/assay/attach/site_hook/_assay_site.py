"""The first thing of assay in a Python process: a watcher for the import that is worth attaching to.

Loaded at the start of the interpreter, by the installed package's .pth file or by `assay run` through the folder that this
file lies in, and only when ASSAY is set. It imports nothing: the package itself is loaded when the first of the watched
modules is imported.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_FRAMEWORKS = ("torch", "transformers", "vllm")  # triggers of the profiles that come with the package

_watcher: "_Watcher | None" = None


def install(environ: "Mapping[str, str]") -> None:
    """Puts the watcher in front of the importers; once a process. environ: the process's environment."""
    global _watcher
    if _watcher is not None:
        return
    names = set(_FRAMEWORKS)
    for selector in environ.get("ASSAY_PROBES", "").split(","):
        names.add(selector.partition(":")[2].partition(".")[0].partition(":")[0])
    # A profile of the user's own has triggers that only it knows, and the script itself is never imported: there any
    # import of a module outside the standard library will do.
    any_module = "." in environ.get("ASSAY_ATTACH", "") or "__main__" in names
    _watcher = _Watcher(frozenset(names), any_module, _own_package())
    sys.meta_path.insert(0, _watcher)


def _own_package() -> str | None:
    """The folder of the package when this file lies in it (nothing needs to be installed then), or None."""
    hook = __file__.rpartition("/")[0]
    attach = hook.rpartition("/")[0]
    return attach.rpartition("/")[0] if hook.endswith("assay/attach/site_hook") else None


def _say(text: str) -> None:
    import os  # there since the interpreter's start; assay.attach.say may be what cannot be imported

    try:
        os.write(2, text.encode(errors="backslashreplace"))
    except OSError:
        pass


class _Watcher:
    """A finder of sys.meta_path. It finds the package itself where `assay run` has it, and starts the attachment at the
    first watched import."""

    def __init__(self, names: frozenset[str], any_module: bool, package: str | None) -> None:
        self._names = names
        self._any_module = any_module
        self._package = package

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name == "assay" and self._package is not None:
            file = self._package + "/__init__.py"
            find = sys.modules["_frozen_importlib_external"].spec_from_file_location
            return find(name, file, submodule_search_locations=[self._package])
        if name not in self._names:
            if not self._any_module or name.partition(".")[0] in sys.stdlib_module_names or name.startswith("assay"):
                return None
        self._names, self._any_module = frozenset(), False
        try:
            import assay.attach

            finder = assay.attach.start()
        except Exception as problem:  # the host goes on whatever is wrong with us
            _say(f"assay: cannot attach: {problem}; the program goes on without\n")
            return None
        return None if finder is None else finder.find_spec(name, path, target)
