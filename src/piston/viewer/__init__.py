"""The local web application: pages that are served to a browser on this computer.

    app = make_app([Route("/lengths", lengths)])    # routes of Starlette
    run(app)                                        # until Ctrl-C

A page is one route, whose function returns `page(template, …)`, and one template that extends
`page.html` of the reports. `inspector` has the page of `piston inspect`.
"""

from piston.viewer.app import make_app, page
from piston.viewer.serve import listen, run

__all__ = ["listen", "make_app", "page", "run"]
