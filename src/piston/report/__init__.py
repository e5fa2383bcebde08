"""A run as one HTML page that needs nothing else: no network, no files beside it, no scripts.

Files hand on in this order: `markup` (escaped HTML), `plots`, `pictures`, `amounts` → what is
shown (`run`, `evaluations`, `stages`, `sample`, `prediction` with `denoising`), gathered in
`contents` → `parts` (each a section) → `page`.
"""

from piston.report.animation import write_animation
from piston.report.evaluations import find_evaluations
from piston.report.page import write_report

__all__ = ["find_evaluations", "write_animation", "write_report"]
