"""The server of the page: numbers in the robot's units, clear errors, fair turns, no strangers."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from piston.inspection import Box, Intervention, Probe
from piston.inspection.occlusion import Occlusion
from piston.viewer.inspector import NUM_SEEDS, _Turns
from piston.viewer.serve import listen

from .page_cases import (
    NAMES,
    NUM_FRAMES,
    TASKS,
    TOP,
    WRIST,
    act,
    fetch,
    make_frames,
    make_policy,
    serving,
)


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def frames(policy, tmp_path_factory):
    return make_frames(policy, tmp_path_factory.mktemp("page") / "data")


@pytest.fixture(scope="module")
def port(policy, frames):
    with serving(policy, frames, "<h1>overview</h1>") as port:
        yield port


def test_what_it_is_about(port):
    status, _, about = fetch(port, "/api/about")
    assert status == 200
    assert about["episodes"] == [[0, NUM_FRAMES], [1, NUM_FRAMES]]
    assert [(camera["slot"], camera["name"]) for camera in about["cameras"]] == [
        (TOP, "cam_high"),
        (WRIST, "cam_left_wrist"),
    ]
    assert [dim["name"] for dim in about["actions"]] == NAMES
    assert sorted(about["prompts"]) == sorted(TASKS)
    assert len(about["states"]) == len(NAMES)
    assert all(0.3 < state["std"] < 1 for state in about["states"])


def test_a_moment_is_as_recorded(port, frames):
    _, _, moment = fetch(port, f"/api/moment/1/{NUM_FRAMES - 2}")
    frame = frames[1, NUM_FRAMES - 2]
    assert moment["prompt"] == TASKS[1]
    np.testing.assert_allclose(moment["state"], frame.observation["state"], rtol=1e-5)
    # Past the end of the episode nothing was recorded.
    assert len(moment["recorded"]) == 2
    np.testing.assert_allclose(moment["recorded"], frame.recorded[:2], rtol=1e-5)


def test_pictures_are_what_the_model_sees(port, policy, frames):
    _, headers, content = fetch(port, f"/api/picture/0/5/{WRIST}")
    assert headers["content-type"] == "image/png"
    seen = Probe(policy).prepare(frames[0, 5], Intervention())["image"][WRIST]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), seen)


def test_answers_are_those_of_the_probe(port, policy, frames):
    box = {"type": "inspection_box", "camera": TOP, "left": 0, "top": 0, "right": 0.5, "bottom": 1}
    change = {"prompt": "stop", "off": [WRIST], "covered": [box], "state": {"left_waist": 0.4}}
    status, _, answer = act(port, change)
    assert status == 200, answer
    versions = [
        Intervention(),
        Intervention(
            prompt="stop",
            off=(WRIST,),
            covered=(Box(TOP, 0, 0, 0.5, 1),),
            state={"left_waist": 0.4},
        ),
    ]
    base, changed = Probe(policy, range(NUM_SEEDS)).chunks(frames[0, 3], versions)
    np.testing.assert_allclose(answer["base"]["mean"], base.mean(0), atol=1e-4)
    np.testing.assert_allclose(answer["changed"]["mean"], changed.mean(0), atol=1e-4)
    np.testing.assert_allclose(answer["changed"]["high"], changed.max(0), atol=1e-4)
    per_action = np.abs(changed - base).mean((0, 1))
    np.testing.assert_allclose(answer["effect"]["per_action"], per_action, atol=1e-4)
    assert answer["effect"]["strength"] > 0


def test_a_map_is_of_the_chosen_actions(port, policy, frames):
    place = {"client": "a", "episode": 0, "frame": 3}
    question = {**place, "camera": TOP, "actions": ["joint_0"]}
    status, _, found = fetch(port, "/api/occlusion", question)
    assert status == 200, found
    sizes = [(right - left) * (bottom - top) for left, top, right, bottom in found["cells"]]
    assert sum(sizes) == pytest.approx(1)
    expected = Occlusion(Probe(policy, range(2)), frames, actions=["joint_0"])
    values = expected.map(frames[0, 3], TOP).value
    np.testing.assert_allclose(found["value"], values, rtol=1e-3, atol=1e-7)
    for wrong in ({"camera": "rear"}, {"actions": ["knee"]}):
        status, _, answer = fetch(port, "/api/occlusion", {**question, **wrong})
        assert status == 400
        assert "There is no" in answer["error"]


def test_nothing_changed_has_no_effect(port):
    _, _, answer = act(port)
    assert answer["changed"] is None
    assert answer["effect"] is None
    _, _, first = act(port, {"black": [TOP]})
    _, _, again = act(port, {"black": [TOP]})
    assert first["changed"] == again["changed"]


def test_a_sentence_that_is_cut_off_is_told(port):
    assert act(port, {"prompt": "stop"})[2]["note"] is None
    assert "has no effect" in act(port, {"prompt": 400 * "stop "})[2]["note"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "expected an object"),
        (b" " * 300_000, "longer than"),
        ({"episode": 0, "frame": 0}, "client is None"),
        ({"client": "a", "episode": "0", "frame": 0}, "episode is '0'; expected int"),
        ({"client": "a", "episode": 9, "frame": 0}, "There is no episode 9"),
        ({"client": "a", "episode": 0, "frame": 99}, "has no frame 99; it has 0 to 23"),
        ({"change": {"of": []}}, "does not know: of"),
        ({"change": {"off": ["rear"]}}, "There is no camera 'rear'; there is base_0_rgb"),
        ({"change": {"state": {"knee": 1}}}, "There is no state 'knee'"),
        ({"change": {"state": {"left_waist": 1e999}}}, "'state' holds NaN or infinity"),
        ({"change": {"covered": [{"type": "inspection_box"}]}}, "not a valid Box"),
        ({"change": {"prompt": 5}}, "change.prompt is 5"),
    ],
)
def test_bad_input_is_named(port, body, message):
    if isinstance(body, dict) and "change" in body:
        body = {"client": "a", "episode": 0, "frame": 0, **body}
    status, _, answer = fetch(port, "/api/act", body)
    assert status == 400
    assert message in answer["error"]
    assert act(port)[0] == 200


def test_places_that_do_not_exist(port):
    for path in ("/api/moment/7/0", "/api/picture/0/99/top", f"/api/picture/0/0/{TOP}x"):
        status, _, answer = fetch(port, path)
        assert status == 400
        assert "There is no" in answer["error"] or "has no frame" in answer["error"]
    assert fetch(port, "/api/nothing")[0] == 404
    assert fetch(port, "/static/../app.py")[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8050"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:9000"}, 200),  # a tunnel
        ({"Host": "192.168.1.7:8050"}, 200),  # served with --host 0.0.0.0
        ({"Host": "[::1]:9000", "Origin": "http://[::1]:9000"}, 200),
    ],
)
def test_other_web_pages_are_refused(port, headers, status):
    found, _, answer = fetch(port, "/api/about", headers=headers)
    assert found == status
    if status == 403:
        assert "is not allowed" in answer["error"]
    body = {"client": "a", "episode": 0, "frame": 0}
    assert fetch(port, "/api/act", body, headers)[0] == status


def test_of_each_client_the_newest_is_answered_and_nobody_waits_for_ever():
    import asyncio

    made = []

    def work(name):
        time.sleep(0.02)
        made.append(name)
        return name

    async def ask():
        turns = _Turns()
        first = asyncio.ensure_future(turns.take("a", work, "a0"))
        await asyncio.sleep(0.005)
        # One client asks for much while two others ask once.
        many = [asyncio.ensure_future(turns.take("a", work, f"a{i}")) for i in range(1, 9)]
        others = [asyncio.ensure_future(turns.take(name, work, name)) for name in ("b", "c")]
        answers = await asyncio.gather(first, *many, *others, return_exceptions=True)
        assert not turns._newest
        return answers

    answers = asyncio.run(ask())
    assert made == ["a0", "a8", "b", "c"]
    replaced = answers[1:8]
    assert {error.status_code for error in replaced} == {409}
    assert answers[8:] == ["a8", "b", "c"]


def test_three_clients_at_once(port):
    answers = {}

    def ask(client):
        for frame in range(6):
            answers[client, frame] = act(port, {"black": [TOP]}, client, frame=frame)

    threads = [threading.Thread(target=ask, args=(client,)) for client in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _, _ in answers.values()} == {200}
    for frame in range(6):
        assert answers["a", frame][2]["changed"] == answers["c", frame][2]["changed"]


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(OSError) as caught:
            listen("127.0.0.1", number)
        assert f"Nothing is served at 127.0.0.1:{number}" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="The port is 65536; expected a number from 0 to 65535"):
        listen("127.0.0.1", 65536)
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_ctrl_c_finishes_what_is_in_flight_and_a_second_one_ends_at_once(tmp_path):
    program = """
import logging, os, sys
from pathlib import Path
from tests.viewer.page_cases import make_frames, make_policy
from piston.viewer import run
from piston.viewer.inspector import make_inspector
logging.basicConfig(level=logging.INFO)
policy = make_policy()
frames = make_frames(policy, Path(sys.argv[1]))
for policy.num_steps in (300, 10**8):  # a fraction of a second, and for ever
    print(run(make_inspector(policy, frames), open_browser=False), flush=True)
os._exit(0)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert _interrupt(process, 1) == 200
        assert _interrupt(process, 2) == 500
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == "True\nFalse\n"
    assert "Traceback" not in err


def _interrupt(process, times):
    """Send Ctrl-C during a request; return the request's status."""
    line = next(line for line in process.stderr if "The page is at" in line)
    port, statuses = int(line.rpartition(":")[2].split("/")[0]), []
    asking = threading.Thread(target=lambda: statuses.append(act(port)[0]), daemon=True)
    assert fetch(port, "/api/about")[0] == 200
    asking.start()
    time.sleep(0.2)
    assert fetch(port, "/api/about")[0] == 200  # after the other request
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    asking.join(20)
    return statuses[0]
