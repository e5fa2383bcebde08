"""Numbers become documents: HTML pages that need nothing else, no network, no files, no scripts.

`page` gathers what is shown and puts the sections together; `training`, `dataset`, `evaluation`,
`prediction`, `transforms` and `timings` each read one kind of data and compute their sections.
`comparison` makes the sections of a page on several runs, `inspection` those of the overview of a
policy. How they look is in `templates/` (Jinja2, one template per section); `figures` lays out
plots and encodes images, `document` renders sections and makes a file of them.
"""
