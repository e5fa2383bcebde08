"""A headless Chromium, spoken to over its DevTools protocol."""

import contextlib
import copy
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
_DEADLINE = 60.0


class Browser:
    """A page. `events` holds all that the browser told on its own, in order."""

    def __init__(self):
        self.events = []
        self._numbers = itertools.count(1)
        self._session = None

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            profile = stack.enter_context(temporary)
            command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = stack.enter_context(subprocess.Popen(command, **quiet))
            stack.callback(process.terminate)
            self._connect(Path(profile) / "DevToolsActivePort", stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _connect(self, address, stack):
        wait_until(lambda: address.exists() and len(address.read_text().split()) == 2)
        port, path = address.read_text().split()
        uri = f"ws://127.0.0.1:{port}{path}"
        connection = connect(uri, max_size=None, open_timeout=_DEADLINE, proxy=None)
        self._socket = stack.enter_context(connection)
        self._attach()

    def _attach(self):
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")

    def another(self):
        """Return another page of this browser; their events are in one list."""
        page = copy.copy(self)
        page._attach()
        return page

    def call(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=_DEADLINE))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, page):
        """Open a file, or an address that is given as text."""
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        wait_until(lambda: self.evaluate("document.readyState") == "complete")

    def resize(self, width, height):
        settings = {"deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **settings)

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key, text=None):
        """Press a key, such as "ArrowLeft"; one that writes has a text."""
        written = {} if text is None else {"text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **written)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def drag(self, selector, begin, end):
        """Move the mouse with its button pressed; places are shares of the element's size."""
        self.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
        at = self.evaluate(box)
        for kind, (x, y) in (("Pressed", begin), ("Moved", end), ("Released", end)):
            place = {"x": at["x"] + x * at["width"], "y": at["y"] + y * at["height"]}
            button = {"button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **place, **button)

    def told(self, *methods):
        return [event["params"] for event in self.events if event.get("method") in methods]


def wait_until(condition):
    """Return the first true value of a condition that is tried again and again."""
    deadline = time.monotonic() + _DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)
    return value
