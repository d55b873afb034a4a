"""Fixtures made ahead of their first test and side by side: a run of vLLM takes half a minute of one core.

`@ahead()` makes a session fixture of a function. When the first one is needed, all that the collected tests ask for are
queued in the order of their first use, and each then works with cores of its own. The function's parameters are `bench`,
`cores`, and other such fixtures, which it waits for."""

import collections
import concurrent.futures
import contextlib
import inspect
import os
import threading

import pytest

_MADE = {}
"""Name -> (function, number of cores)."""


class Cores:
    """Lends numbers of cores. Who asks first is served first, so that a run of two is not overtaken for ever."""

    def __init__(self):
        self.numbers = sorted(os.sched_getaffinity(0))[:4]  # memory for four engines, whatever the machine has
        self._free = list(self.numbers)
        self._waiting = collections.deque()  # in the order in which they asked
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lend(self, count=1):
        """Where there are fewer, some come twice: two ranks then share a core."""
        there = min(count, len(self.numbers))
        me = object()
        with self._changed:
            self._waiting.append(me)
            self._changed.wait_for(lambda: self._waiting[0] is me and len(self._free) >= there)
            self._waiting.popleft()
            taken = [self._free.pop(0) for _ in range(there)]
            self._changed.notify_all()
        try:
            yield (taken * count)[:count]
        finally:
            with self._changed:
                self._free = sorted(self._free + taken)
                self._changed.notify_all()


class Queue:
    """Makes fixtures on threads."""

    def __init__(self, bench):
        self.bench = bench
        self.cores = Cores()
        self._futures = {}
        # More than cores: one that waits for another fixture holds none.
        self._threads = concurrent.futures.ThreadPoolExecutor(len(self.cores.numbers) + 4)

    def add(self, name):
        """What it waits for is queued before it, so that waiting threads always wait for running ones."""
        if name not in self._futures:
            function, count = _MADE[name]
            others = [p for p in inspect.signature(function).parameters if p not in ("bench", "cores")]
            waited = {other: self.add(other) for other in others}
            self._futures[name] = self._threads.submit(self._make, function, count, waited)
        return self._futures[name]

    def _make(self, function, count, waited):
        given = {name: future.result() for name, future in waited.items()}
        with self.cores.lend(count) as cores:
            return function(self.bench, cores, **given)

    def close(self):
        self._threads.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def queue(bench, request):
    made = Queue(bench)
    for item in request.session.items:
        for name in filter(_MADE.__contains__, item.fixturenames):
            made.add(name)
    yield made
    made.close()


def ahead(cores=1):
    def register(function):
        name = function.__name__
        _MADE[name] = function, cores

        @pytest.fixture(scope="session", name=name)
        def result(queue):
            return queue.add(name).result()

        return result

    return register
