"""Episodes are drawn after the fact: the same pictures as at the time, and only those wanted."""

import av
import numpy as np
import pytest

from piston.sim import make_environment
from piston.sim.rollouts import VideoWriter
from piston.sim.scores import Outcome

STEPS = 12


def play(environment, seed, see):
    environment.reset(seed)
    random = np.random.default_rng(seed)
    action = environment.observe()["state"].astype(float)
    for _ in range(STEPS):
        environment.step(action + random.uniform(-0.3, 0.3, environment.action_dim))
        see(environment)


@pytest.mark.parametrize("name", ["aloha_transfer_cube", "metaworld:drawer-open-halfway"])
def test_a_pose_gives_the_picture_of_its_moment(name):
    environment = make_environment(name)
    moments = []
    play(environment, 3, lambda e: moments.append((e.pose(), e.render(60, 80))))
    assert np.abs(moments[0][1].astype(int) - moments[-1][1]).max() > 50  # something moved
    for pose, picture in reversed(moments):
        environment.set_pose(pose)
        np.testing.assert_array_equal(environment.render(60, 80), picture)
    with pytest.raises(ValueError, match=r"Call reset\(seed\)"):
        environment.step(np.zeros(environment.action_dim))
    environment.reset(3)
    environment.step(np.zeros(environment.action_dim))


def test_the_first_of_each_kind_are_kept(tmp_path):
    videos = VideoWriter(tmp_path, of_each=1)
    environment = make_environment("aloha_transfer_cube")
    at_the_end = {}
    for seed, success in enumerate([True, True, False, False]):
        play(environment, seed, videos.add_step)
        at_the_end[seed] = environment.render(240, 320)
        videos.end_episode(environment, Outcome(seed, "", success, success, STEPS, {}))
    names = ["success_seed0.mp4", "failure_seed2.mp4"]
    assert videos.written == [tmp_path / name for name in names]
    for path, seed in zip(videos.written, (0, 2)):
        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert len(frames) == STEPS // 4  # 50 Hz become 12.5
        # Compressed, but this picture and no other.
        errors = {s: np.abs(frames[-1].astype(int) - at_the_end[s]).mean() for s in at_the_end}
        assert min(errors, key=errors.get) == seed
        assert errors[seed] < 3
