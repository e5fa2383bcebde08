"""Suggestions for names that are not known."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ` Did you mean 'x'?` with the known name nearest to `name`, or an empty string.

    The leading space lets a message append it: f"No preset is named {name!r}.{did_you_mean(…)}"
    """
    nearest = difflib.get_close_matches(name, [str(other) for other in known], n=1, cutoff=cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
