"""Cases of the end-to-end tests are independent processes: they run on all cores, and each test judges its own."""

import concurrent.futures
import os

import pytest


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """case name -> zero-argument function that gives `run_case(name, folder)` of the module, or raises what it raised."""
    folder = tmp_path_factory.mktemp("cases")
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.module is request.module and "name" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = {}
        for name in names:
            place = folder / name.replace("/", "_")
            place.mkdir()
            futures[name] = pool.submit(request.module.run_case, name, place)
        yield {name: future.result for name, future in futures.items()}
