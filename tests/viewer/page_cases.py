"""A tiny policy with random weights, a data set with two cameras, and the page about them."""

import contextlib
import dataclasses
import http.client
import json
import threading

import numpy as np
import torch
import uvicorn

from piston import presets, weights
from piston.data.record import Recorder
from piston.inference.policy import Policy
from piston.inspection.frames import Frames
from piston.models.configs import GemmaSize, VisionSize
from piston.robots.aloha import DIM, repack_aloha
from piston.transforms.normalize import NormStats
from piston.viewer.inspector import make_inspector

PIXELS, FPS, NUM_FRAMES, NUM_EPISODES, HORIZON = 32, 10, 24, 2, 6
NAMES = [f"joint_{dim}" for dim in range(DIM)]
TASKS = ("wave both arms", "fold a shirt")
TOP, WRIST = "base_0_rgb", "left_wrist_0_rgb"
_GEMMA = GemmaSize(width=16, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
_VISION = VisionSize(width=16, depth=0, mlp_dim=16, num_heads=2, patch=16, stem=8)


def record(folder):
    image = {"dtype": "video", "shape": (PIXELS, PIXELS, 3)}
    numbers = {"dtype": "float32", "shape": (DIM,), "names": NAMES}
    features = {f"observation.images.{name}": image for name in ("top", "wrist")}
    features |= {"observation.state": numbers, "action": numbers}
    with Recorder(folder, FPS, features, "aloha", codec="h264") as recorder:
        for episode in range(NUM_EPISODES):
            for step in range(NUM_FRAMES):
                recorder.add_frame(_frame(episode, step), TASKS[episode])
            recorder.save_episode()


def _frame(episode, step):
    pictures = np.full((2, PIXELS, PIXELS, 3), 60, np.uint8)
    pictures[0, 8:24, step:][:, :6] = (220, 60, 40)
    pictures[1, 4:12, 8:24] = (40, 10 * step, 200)
    angles = np.sin(step / 8 + np.arange(DIM) + episode).astype(np.float32)
    return {
        "observation.images.top": pictures[0],
        "observation.images.wrist": pictures[1],
        "observation.state": angles,
        "action": 0.9 * angles,
    }


def make_policy():
    preset = presets.get("tiny_aloha_sim")
    model = dataclasses.replace(
        preset.model,
        action_horizon=HORIZON,
        image_size=PIXELS,
        cameras=(TOP, WRIST),
        vision=_VISION,
        vlm=_GEMMA,
        action_expert=_GEMMA,
    )
    cameras = {"cam_high": "observation.images.top", "cam_left_wrist": "observation.images.wrist"}
    slots = {"cam_high": TOP, "cam_left_wrist": WRIST}
    data = dataclasses.replace(
        preset.data, repack_transforms=repack_aloha(**cameras), cameras=slots, action_stride=1
    )
    ones = np.ones(DIM)
    stats = NormStats(mean=0.1 * ones, std=0.7 * ones, q01=-ones, q99=ones)
    pipeline = dataclasses.replace(
        data.create(preset.assets_dirs, model), norm_stats={"state": stats, "actions": stats}
    )
    torch.manual_seed(0)
    return Policy(weights.build_model(model), pipeline, num_steps=3)


def make_frames(policy, folder):
    record(folder)
    return Frames.open(policy, folder)


def serving(policy, frames, overview=None):
    return serving_app(make_inspector(policy, frames, overview, title="a tiny policy"))


@contextlib.contextmanager
def serving_app(app):
    """Yields the port of a server."""
    config = uvicorn.Config(app, port=0, log_config=None, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def fetch(port, path, body=None, headers=None):
    """Return the status, the headers, and the content, read as JSON if it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        content = body if body is None or isinstance(body, bytes) else json.dumps(body)
        method = "GET" if body is None else "POST"
        connection.request(method, path, content, headers or {})
        answer = connection.getresponse()
        read = answer.read()
        found = dict(answer.getheaders())
        if found.get("content-type") == "application/json":
            read = json.loads(read)
        return answer.status, found, read


def act(port, change=None, client="a", episode=0, frame=3):
    body = {"client": client, "episode": episode, "frame": frame, "change": change or {}}
    return fetch(port, "/api/act", body)
