"""A run as one HTML page that needs nothing else: no network, no files beside it, no scripts.

Files hand on in this order: `markup` (escaped HTML), `plots`, `pictures`, `amounts` → what is
shown (`run`, `evaluations`, `stages`, `sample`, `prediction` with `denoising`), gathered in
`contents` → `parts` (each a section) → `page`.
"""
