from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from piston.training.run import list_runs
from piston.viewer import make_app, page

TEMPLATE = Path(__file__).with_name("runs.html")


def runs(_: Request) -> Response:
    return page(TEMPLATE, title="Runs", runs=list_runs(Path("checkpoints")))


app = make_app([Route("/", runs)])
