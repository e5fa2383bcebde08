"""Counts and times of a running server, as text that Prometheus reads.

Everything is updated in the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_HISTOGRAMS = {
    "batch_size": ((1, 2, 4, 8, 16, 32, 64), "Requests that shared one inference, per request."),
    "inference_seconds": (_SECONDS, "Time the policy took, per request."),
    "queue_seconds": (_SECONDS, "Time a request waited for the policy."),
    "request_seconds": (_SECONDS, "Time from a request's arrival until its reply."),
}


class Metrics:
    """Requests (each is answered with a result or with an error of some type), sizes and times."""

    def __init__(self, error_types: Iterable[str]) -> None:
        self.requests = 0
        self.errors = dict.fromkeys(error_types, 0)
        self._counts = {
            name: [0] * (len(buckets) + 1) for name, (buckets, _) in _HISTOGRAMS.items()
        }
        self._sums = dict.fromkeys(_HISTOGRAMS, 0.0)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        # A bucket's bound belongs to the bucket.
        self._counts[name][bisect.bisect_left(_HISTOGRAMS[name][0], value)] += 1
        self._sums[name] += value

    def render(self, queue_length: int, connections: int) -> str:
        errors = {f'{{type="{kind}"}}': count for kind, count in self.errors.items()}
        families: list[tuple[str, str, str, Mapping[str, object]]] = [
            ("requests_total", "counter", "Requests received.", {"": self.requests}),
            ("errors_total", "counter", "Requests answered with an error.", errors),
            ("queue_length", "gauge", "Requests waiting for the policy.", {"": queue_length}),
            ("connections", "gauge", "Open connections.", {"": connections}),
        ]
        for name, (buckets, meaning) in _HISTOGRAMS.items():
            bounds = [*(f"{bound:g}" for bound in buckets), "+Inf"]
            totals = list(itertools.accumulate(self._counts[name]))
            samples: dict[str, object] = {
                f'_bucket{{le="{bound}"}}': total
                for bound, total in zip(bounds, totals, strict=True)
            }
            samples |= {"_sum": f"{self._sums[name]:.9g}", "_count": totals[-1]}
            families.append((name, "histogram", meaning, samples))
        lines = []
        for name, kind, meaning, values in families:
            lines += [f"# HELP piston_{name} {meaning}", f"# TYPE piston_{name} {kind}"]
            lines += [f"piston_{name}{suffix} {value}" for suffix, value in values.items()]
        return "\n".join(lines) + "\n"
