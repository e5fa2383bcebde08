"""A page of one's own is one route and one template: the example of docs/extending.md."""

import html.parser
import runpy
from pathlib import Path

import pytest
from starlette.routing import Route

from piston.viewer import make_app

from .page_cases import fetch, serving_app

EXAMPLE = Path(__file__).parents[2] / "examples" / "extending" / "runs.py"


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The application of the example, with a run of which the name is not HTML."""
    run = tmp_path / "checkpoints" / "tiny" / "a & b"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 4, "loss": 0.25}\n')
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(EXAMPLE))["app"]


class Text(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.words = []
        self.feed(page)

    def handle_data(self, data):
        self.words += data.split()


def test_the_documentation_shows_the_template():
    page = (EXAMPLE.parents[2] / "docs" / "extending.md").read_text("utf-8")
    assert f"```html\n{EXAMPLE.with_suffix('.html').read_text('utf-8')}```" in page


def test_a_page_is_a_route_and_a_template(example, tmp_path):
    with serving_app(example) as port:
        status, headers, content = fetch(port, "/")
        assert status == 200
        assert headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in headers["content-security-policy"]
        words = Text(content.decode()).words
        assert "Runs tiny/a & b step 4, loss 0.25" in " ".join(words)
        assert "@media (prefers-color-scheme: dark)" in content.decode()
        # It is made anew for each request.
        (tmp_path / "checkpoints" / "tiny" / "a & b" / "metrics.jsonl").unlink()
        assert b"no step yet" in fetch(port, "/")[2]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("The step is -1."), 400, "The step is -1."),
        (KeyError("There is no run."), 400, "There is no run."),
        (RuntimeError("broken"), 500, "The server failed: RuntimeError('broken')"),
    ],
)
def test_an_error_is_json(error, status, text):
    def fail(_):
        raise error

    with serving_app(make_app([Route("/", fail)])) as port:
        assert fetch(port, "/")[::2] == (status, {"error": text})
        assert fetch(port, "/nothing")[::2] == (404, {"error": "Not Found"})


def test_other_sites_get_nothing_of_it(example):
    with serving_app(example) as port:
        assert fetch(port, "/", headers={"Origin": "http://evil.example"})[0] == 403
        assert fetch(port, "/", headers={"Host": "evil.example"})[0] == 403
