"""Counts and times of a running server, as text that Prometheus reads.

Everything is updated in the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    def __init__(self, name: str, meaning: str, buckets: Sequence[float]) -> None:
        self._name, self._meaning = name, meaning
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        # A bucket's bound belongs to the bucket.
        self._counts[bisect.bisect_left(self._buckets, value)] += 1
        self._sum += value

    def lines(self) -> Iterable[str]:
        yield from _head(self._name, self._meaning, "histogram")
        bounds = [*(f"{bound:g}" for bound in self._buckets), "+Inf"]
        for bound, count in zip(bounds, itertools.accumulate(self._counts)):
            yield f'{self._name}_bucket{{le="{bound}"}} {count}'
        yield f"{self._name}_sum {self._sum:.9g}"
        yield f"{self._name}_count {sum(self._counts)}"


class Metrics:
    """Requests (each is answered with a result or with an error of some type), sizes and times."""

    def __init__(
        self,
        error_types: Iterable[str],
        *,
        queue_length: Callable[[], int],
        connections: Callable[[], int],
    ) -> None:
        self.requests = 0
        self.errors = dict.fromkeys(error_types, 0)
        self._queue_length, self._connections = queue_length, connections
        self.batch_size = Histogram(
            "piston_batch_size", "Requests that shared one inference, per request.", _SIZES
        )
        self.inference = Histogram(
            "piston_inference_seconds", "Time the policy took, per request.", _SECONDS
        )
        self.queue = Histogram(
            "piston_queue_seconds", "Time a request waited for the policy.", _SECONDS
        )
        self.total = Histogram(
            "piston_request_seconds", "Time from a request's arrival until its reply.", _SECONDS
        )

    def render(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterable[str]:
        yield from _head("piston_requests_total", "Requests received.", "counter")
        yield f"piston_requests_total {self.requests}"
        yield from _head("piston_errors_total", "Requests answered with an error.", "counter")
        for kind, count in self.errors.items():
            yield f'piston_errors_total{{type="{kind}"}} {count}'
        yield from _head("piston_queue_length", "Requests waiting for the policy.", "gauge")
        yield f"piston_queue_length {self._queue_length()}"
        yield from _head("piston_connections", "Open connections.", "gauge")
        yield f"piston_connections {self._connections()}"
        for histogram in (self.batch_size, self.inference, self.queue, self.total):
            yield from histogram.lines()


def _head(name: str, meaning: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"
