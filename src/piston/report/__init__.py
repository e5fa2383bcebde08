"""A run as one HTML page that needs nothing else: no network, no files beside it, no scripts.

`page` gathers what is shown and puts the sections together; `training`, `dataset`, `evaluation`,
`prediction`, `transforms` and `timings` each read one kind of data and make its sections, out of
`markup`. `comparison` makes the sections of a page on several runs, `inspection` those of the
overview of a policy. `document` makes a file of sections.
"""
