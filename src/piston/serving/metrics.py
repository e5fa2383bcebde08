"""Counts and times of a running server, as text that Prometheus reads.

Everything is updated in the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence, Sized

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        # A bucket's bound belongs to the bucket.
        self._counts[bisect.bisect_left(self._buckets, value)] += 1
        self._sum += value

    def samples(self) -> dict[str, object]:
        bounds = [*(f"{bound:g}" for bound in self._buckets), "+Inf"]
        counts = zip(bounds, itertools.accumulate(self._counts), strict=True)
        buckets = {f'_bucket{{le="{bound}"}}': count for bound, count in counts}
        return {**buckets, "_sum": f"{self._sum:.9g}", "_count": sum(self._counts)}


class Metrics:
    """Requests (each is answered with a result or with an error of some type), sizes and times."""

    def __init__(self, error_types: Iterable[str], waiting: Sized, connections: Sized) -> None:
        self.requests = 0
        self.errors = dict.fromkeys(error_types, 0)
        self._waiting, self._connections = waiting, connections
        self.batch_size = Histogram(_SIZES)
        self.inference, self.queue, self.total = (Histogram(_SECONDS) for _ in range(3))

    def render(self) -> str:
        errors = {f'{{type="{kind}"}}': count for kind, count in self.errors.items()}
        families: list[tuple[str, str, str, Mapping[str, object]]] = [
            ("requests_total", "counter", "Requests received.", {"": self.requests}),
            ("errors_total", "counter", "Requests answered with an error.", errors),
            ("queue_length", "gauge", "Requests waiting for the policy.", {"": len(self._waiting)}),
            ("connections", "gauge", "Open connections.", {"": len(self._connections)}),
        ]
        histograms = {
            ("batch_size", "Requests that shared one inference, per request."): self.batch_size,
            ("inference_seconds", "Time the policy took, per request."): self.inference,
            ("queue_seconds", "Time a request waited for the policy."): self.queue,
            ("request_seconds", "Time from a request's arrival until its reply."): self.total,
        }
        for (name, meaning), histogram in histograms.items():
            families.append((name, "histogram", meaning, histogram.samples()))
        lines = []
        for name, kind, meaning, samples in families:
            lines += [f"# HELP piston_{name} {meaning}", f"# TYPE piston_{name} {kind}"]
            lines += [f"piston_{name}{suffix} {value}" for suffix, value in samples.items()]
        return "\n".join(lines) + "\n"
