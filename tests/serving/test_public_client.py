"""openpi-client from PyPI drives a served model: sizes of images, many inferences, a restart."""

import numpy as np
import pytest
import torch
from openpi_client.websocket_client_policy import WebsocketClientPolicy

from piston.inference.loading import random_policy
from piston.serving import ServerConfig, running_server

SIZES = [(224, 224), (480, 640), (64, 48), (1, 1), (720, 1280)]


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    policy = random_policy("pi0_aloha", num_steps=1)
    assert "reset_pose" in policy.metadata
    return policy


def _observation(number: int) -> dict:
    random = np.random.default_rng(number)
    images = {}
    for offset, camera in enumerate(("cam_high", "cam_left_wrist", "cam_right_wrist")):
        height, width = SIZES[(number + offset) % len(SIZES)]
        # Every other one with its channels first, as ALOHA's own code sends them.
        shape = (3, height, width) if number % 2 else (height, width, 3)
        images[camera] = random.integers(0, 256, shape, dtype=np.uint8)
    if number % 5 == 0:
        del images["cam_left_wrist"]
    state = random.uniform(0, 1, 14).astype(np.float32)
    return {"images": images, "state": state, "prompt": f"task {number}", "seed": number}


def _drive(policy, port: int, numbers) -> None:
    client = WebsocketClientPolicy("127.0.0.1", port)
    assert client.get_server_metadata()["reset_pose"] == policy.metadata["reset_pose"]
    for number in numbers:
        reply = client.infer(_observation(number))
        expected = policy.infer(_observation(number))["actions"]
        np.testing.assert_allclose(reply["actions"], expected, rtol=0, atol=1e-5)
        assert 0 < reply["policy_timing"]["infer_ms"] <= reply["server_timing"]["infer_ms"]
    client._ws.close()


def test_mixed_sizes_many_inferences_and_a_restart(policy):
    with running_server(policy) as server:
        port = server.port
        _drive(policy, port, range(20))
    with pytest.raises(ConnectionRefusedError):
        WebsocketClientPolicy("127.0.0.1", port)
    with running_server(policy, ServerConfig(port=port)):
        _drive(policy, port, range(20, 30))
