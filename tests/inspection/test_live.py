"""A live set against training: each fault is recognised, with no other verdict."""

import dataclasses
import functools
import types

import numpy as np
import pytest
from PIL import Image

from piston import presets
from piston.data.record import Recorder
from piston.inference.policy import Policy
from piston.inference.recording import RecordingPolicy
from piston.inspection import Frames
from piston.inspection.live import compare, compare_sets
from piston.inspection.live_pictures import ComparedSet
from piston.inspection.live_verdicts import live_verdicts
from piston.inspection.results import as_json
from piston.robots import RobotInputs
from piston.robots.description import with_robot
from piston.weights import build_model

RATE, STEPS, PIXELS = 10, 40, 64
NAMES = ("shoulder", "elbow", "gripper")
COLUMNS = {"front": "video.front", "wrist": "video.wrist", "joints": "qpos", "targets": "told"}
ROBOT = RobotInputs(
    name="two joints",
    cameras={"front": "base_0_rgb", "wrist": "left_wrist_0_rgb"},
    state={"joints": NAMES},
    actions={"targets": NAMES},
    images="images",
    columns=COLUMNS,
)


@pytest.fixture(scope="module")
def policy():
    config = with_robot(presets.get("tiny_robot"), ROBOT)
    pipeline = config.data.create(config.assets_dirs, config.model)
    return Policy(build_model(config.model), dataclasses.replace(pipeline, norm_stats={}))


@pytest.fixture(scope="module")
def training(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "set"
    write(folder, [episode(seed) for seed in range(16)])
    return ComparedSet(policy, Frames.open(policy, folder), num_images=128)


def scene(seed):
    """A background of coloured patches, with more red than blue."""
    patches = np.random.default_rng(seed).integers(30, 200, (5, 5, 3)).astype(np.uint8)
    patches[..., 2] //= 2
    return np.asarray(Image.fromarray(patches).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC))


SCENES = {"front": scene(1), "wrist": scene(2)}


def pictures(state):
    """A box at the place that the joints say, whose height is the gripper's opening."""
    found = {}
    for name, background in SCENES.items():
        image = background.copy()
        x, y = ((0.5 + 0.4 * np.clip(state[:2], -1, 1)) * PIXELS).astype(int)
        image[max(0, y - 3) : y + 4 + int(8 * state[2]), max(0, x - 6) : x + 7] = (230, 230, 230)
        found[name] = image
    return found


def episode(seed, prompt="wave"):
    """Frames of joints that follow their targets to a random place, where the gripper closes."""
    random = np.random.default_rng(seed)
    start, goal = random.uniform(-0.8, 0.8, (2, 2))
    state, frames = np.array([*start, 1.0]), []
    for step in range(STEPS):
        share = min(1.0, step / 25)
        target = np.array([*(start + share * (goal - start)), 1.0 if step < 28 else 0.2])
        frames.append(
            {
                "images": pictures(state),
                "joints": state.astype(np.float32),
                "targets": target.astype(np.float32),
                "prompt": prompt,
            }
        )
        state = state + 0.7 * (target - state) + random.normal(0, 0.002, 3)
    return frames


def changed(frames, state=None, image=None):
    """Frames with a function of the state, or of the images by name, applied."""
    return [
        {
            **one,
            "joints": np.asarray(state(one["joints"]) if state else one["joints"], np.float32),
            "images": {k: np.ascontiguousarray(v) for k, v in image(one["images"]).items()}
            if image
            else one["images"],
        }
        for one in frames
    ]


def write(folder, episodes, rate=RATE, cameras=("front", "wrist")):
    """An ordinary data set of the robot."""
    shape = next(iter(episodes[0][0]["images"].values())).shape
    image = {"dtype": "video", "shape": shape}
    vector = {"dtype": "float32", "shape": (3,), "names": list(NAMES)}
    features = {COLUMNS[name]: image for name in cameras}
    features |= {COLUMNS[name]: vector for name in ("joints", "targets")}
    with Recorder(folder, rate, features, codec="h264") as recorder:
        for frames in episodes:
            for one in frames:
                flat = {**one, **one["images"]}
                frame = {COLUMNS[k]: flat[k] for k in cameras}
                frame |= {COLUMNS[k]: flat[k].astype("f4") for k in ("joints", "targets")}
                recorder.add_frame(frame, one["prompt"])
            recorder.save_episode()
    return folder


class Replay(Policy):
    """A policy that answers with what an episode has next."""

    def infer_batch(self, observations):
        return [{"actions": self.answer} for _ in observations]


def serve(policy, folder, episodes, every=5, rate=RATE, counts=True):
    """A recording of a server that is asked `every` so many steps, which the client may count."""
    clock = types.SimpleNamespace(now=0.0)
    replay = Replay(policy.model, policy.data)
    recording = RecordingPolicy(replay, folder, fps=10.0, clock=lambda: clock.now)
    for frames in episodes:
        targets = np.stack([one["targets"] for one in frames])
        targets = np.concatenate([targets, np.repeat(targets[-1:], 10, axis=0)])
        for step in range(0, len(frames), every):
            replay.answer = targets[step : step + 10]
            sent = {key: value for key, value in frames[step].items() if key != "targets"}
            sent |= {"executed_steps": min(step, every)} if counts else {}
            recording.infer_batch([sent])
            clock.now += every / rate
        clock.now += 100
    recording.close()
    return folder


def write_live(_, folder, episodes):
    return write(folder, episodes)


def found(policy, training, folder, **options):
    live = ComparedSet(policy, Frames.open(policy, folder, **options), num_images=32)
    comparison = compare_sets(training, live)
    return {(one.kind, one.subject): one for one in live_verdicts(comparison)}


LIVE = [episode(seed) for seed in range(100, 104)]


def of_all(**changes):
    return [changed(frames, **changes) for frames in LIVE]


def test_an_equal_set_and_its_recording_raise_nothing(policy, training, tmp_path):
    assert not found(policy, training, write(tmp_path / "set", LIVE))
    live = Frames.open(policy, serve(policy, tmp_path / "recording", LIVE))
    assert live.is_recording
    progress: list[float] = []
    comparison = compare(policy, training.frames, live, lambda n, of: progress.append(n / of))
    assert progress == sorted(progress)
    assert progress[-1] <= 1
    assert not live_verdicts(comparison)
    assert comparison.timing.live_rate == pytest.approx(RATE, rel=0.1)
    assert comparison.timing.request_interval == pytest.approx(0.5)
    # A frame has the chunk that was answered, and the observation as it was sent.
    frame = live[0, 2]
    assert frame.observation["images"].keys() == {"front", "wrist"}
    np.testing.assert_allclose(frame.observation["joints"], LIVE[0][10]["joints"])
    np.testing.assert_allclose(frame.recorded, [one["targets"] for one in LIVE[0][10:20]])
    assert not comparison.undecided
    told = as_json(comparison)
    assert told["dimensions"][2]["name"] == "gripper"
    assert "live_picture" not in told["cameras"][0]


def test_requests_without_a_sentence_have_none(policy, tmp_path):
    silent = [{k: v for k, v in one.items() if k != "prompt"} for one in LIVE[1]]
    live = Frames.open(policy, serve(policy, tmp_path / "live", [LIVE[0], silent]))
    assert live.tasks == ["wave"]
    first, *_, last = live.episodes
    assert live[first, 0].prompt == "wave"
    assert "prompt" not in live[last, 0].observation


def test_a_robot_that_asks_rarely_is_compared_with_such_moments_of_training(policy, tmp_path):
    """The gripper is open in both requests of each episode, and closed in most of training."""
    known = write(tmp_path / "training", [episode(seed)[20:] for seed in range(16)])
    training = ComparedSet(policy, Frames.open(policy, known), num_images=128)
    asked = [frames[20:28] for frames in LIVE]
    live = found(policy, training, serve(policy, tmp_path / "live", asked, every=7))
    assert ("state-shifted", "gripper") not in live


OFFSET = np.array([0, 0.1, 0])


WAYS = {
    "dataset": write_live,
    "recording": serve,
    "recording without counts": functools.partial(serve, counts=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_joint_with_another_zero_is_seen_inside_its_range(policy, training, tmp_path, way):
    faulty = of_all(state=lambda state: state + OFFSET)
    folder = WAYS[way](policy, tmp_path / "live", faulty)
    ((kind, verdict),) = found(policy, training, folder).items()
    assert kind == ("state-offset", "elbow")
    assert verdict.number == pytest.approx(0.1, abs=0.02)
    assert verdict.number > verdict.threshold


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("change", "joints"),
    [(lambda state: state * [1, -1, 1], ["elbow"]), (lambda state: state[[1, 0, 2]], NAMES[:2])],
    ids=["turned round", "exchanged"],
)
def test_joints_that_do_not_follow_their_targets(policy, training, tmp_path, change, joints, way):
    folder = WAYS[way](policy, tmp_path / "live", of_all(state=change))
    live = found(policy, training, folder)
    for joint in joints:
        verdict = live["state-not-following", joint]
        assert verdict.number > verdict.threshold
    assert way != "dataset" or len(live) == len(joints)


def test_a_state_outside_the_training_range_is_counted(policy, training, tmp_path):
    outside = [[{**one, "targets": one["targets"] + 1} for one in frames] for frames in LIVE[:2]]
    faulty = [changed(frames, state=lambda state: state + [1, 1, 1]) for frames in outside]
    both = found(policy, training, write(tmp_path / "set", [*faulty, *LIVE[2:]]))
    verdict = both["state-outside-range", "gripper"]
    assert verdict.number == pytest.approx(2 / 4, abs=0.1)
    assert "outside the training range in" in verdict.sentence
    assert all(kind == "state-outside-range" for kind, _ in both)


def test_a_gripper_that_never_closes_as_far(policy, training, tmp_path):
    faulty = [
        [{**one, "targets": np.maximum(one["targets"], [-9, -9, 0.5])} for one in frames]
        for frames in of_all(state=lambda state: np.maximum(state, [-9, -9, 0.5]))
    ]
    ((kind, verdict),) = found(policy, training, write(tmp_path / "set", faulty)).items()
    assert kind == ("gripper-range", "gripper")
    assert "never goes beyond 0.5" in verdict.sentence


def every_camera(change):
    return lambda images: {name: change(image) for name, image in images.items()}


def zoomed(image):
    part = Image.fromarray(image).resize((PIXELS, PIXELS), box=(11, 11, PIXELS - 11, PIXELS - 11))
    return np.asarray(part)


PICTURES = {
    "red-blue-swapped": every_camera(lambda image: image[..., ::-1]),
    "cameras-swapped": lambda images: {"front": images["wrist"], "wrist": images["front"]},
    "camera-turned": every_camera(np.rot90),
    "camera-brightness": every_camera(lambda image: (0.6 * image).astype(np.uint8)),
    "camera-zoomed": every_camera(zoomed),
    "camera-aspect": every_camera(lambda image: image[:48]),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_faults_of_pictures(policy, training, tmp_path, kind):
    folder = write(tmp_path / "set", of_all(image=PICTURES[kind])[:2])
    assert found(policy, training, folder).keys() == {(kind, "front"), (kind, "wrist")}


def test_a_little_more_light_is_no_fault_and_a_lens_cap_is_one(policy, training, tmp_path):
    """Undoing a small difference helps as much as undoing a large one."""
    lighter = of_all(image=every_camera(lambda image: np.minimum(image, 250) + np.uint8(5)))
    assert not found(policy, training, write(tmp_path / "lighter", lighter[:2]))
    dark = found(
        policy, training, write(tmp_path / "dark", of_all(image=every_camera(np.zeros_like)))
    )
    assert dark.keys() == {("camera-brightness", "front"), ("camera-brightness", "wrist")}
    assert all(one.number > one.threshold for one in dark.values())


def test_one_episode_of_training_is_no_measure_of_its_pictures(policy, tmp_path):
    few = Frames.open(policy, write(tmp_path / "set", [episode(0)]))
    other = [changed(LIVE[0], image=every_camera(moved))]
    comparison = compare(policy, few, Frames.open(policy, write(tmp_path / "live", other)))
    assert comparison.cameras[0].own_distance is None
    assert "camera-strange" not in {one.kind for one in live_verdicts(comparison)}
    assert any("one episode only" in one for one in comparison.undecided)


def moved(image):
    return np.roll(image, (20, 24), (0, 1))


def test_another_scene_and_its_colours(policy, training, tmp_path):
    other = of_all(image=every_camera(moved))[:2]
    live = found(policy, training, write(tmp_path / "set", other))
    assert live.keys() == {("camera-strange", "front"), ("camera-strange", "wrist")}
    swapped = [changed(one, image=every_camera(lambda image: image[..., ::-1])) for one in other]
    live = found(policy, training, write(tmp_path / "swapped", swapped))
    assert live.keys() == {("red-blue-swapped", "front"), ("red-blue-swapped", "wrist")}


def shown_from(frames, number):
    """Frames in which the wrist camera shows the frame that a function of the number says."""
    chosen = [frames[max(0, number(i))]["images"]["wrist"] for i in range(len(frames))]
    return [
        {**one, "images": {**one["images"], "wrist": image}}
        for one, image in zip(frames, chosen, strict=True)
    ]


def test_frozen_and_late_cameras(policy, training, tmp_path):
    frozen = [shown_from(frames, lambda i: 0 * i) for frames in LIVE]
    live = found(policy, training, write(tmp_path / "frozen", frozen))
    assert live.keys() == {("camera-frozen", "wrist")}
    late = [shown_from(frames, lambda i: i - 3) for frames in LIVE]
    live = found(policy, training, write(tmp_path / "late", late))
    assert live.keys() == {("camera-late", "wrist")}
    assert live["camera-late", "wrist"].number == pytest.approx(0.3, abs=0.1)


def test_a_live_set_that_hardly_began_raises_nothing(policy, training, tmp_path):
    begun = [frames[:1] for frames in LIVE]
    assert not found(policy, training, write(tmp_path / "set", begun))


@pytest.mark.parametrize("recorded", [False, True])
def test_another_control_rate(policy, training, tmp_path, recorded):
    folder = tmp_path / "live"
    if recorded:
        serve(policy, folder, LIVE, rate=20)
    else:
        write(folder, LIVE, rate=20)
    ((kind, verdict),) = found(policy, training, folder).items()
    assert kind[0] == "rate"
    assert "2.00 times the speed" in verdict.sentence


def test_a_recording_without_counts_does_not_tell_the_rate(policy, training, tmp_path):
    folder = serve(policy, tmp_path / "live", LIVE, rate=20, counts=False)
    assert not found(policy, training, folder)
    comparison = compare(policy, training.frames, Frames.open(policy, folder))
    assert comparison.timing.live_rate is None
    assert "how fast the robot executes its chunks" in " ".join(comparison.undecided)


def test_requests_after_the_end_of_a_chunk_and_a_new_sentence(policy, training, tmp_path):
    episodes = [episode(seed, prompt="dance") for seed in range(100, 104)]
    live = found(policy, training, serve(policy, tmp_path / "set", episodes, every=20))
    assert live.keys() == {("late-requests", "requests"), ("new-prompt", "dance")}


def test_a_set_without_videos_is_compared_in_numbers(policy, training, tmp_path):
    faulty = of_all(state=lambda state: state + OFFSET)
    folder = write(tmp_path / "set", faulty, cameras=())
    live = found(policy, training, folder, needs_cameras=False)
    missing = {("camera-missing", "front"), ("camera-missing", "wrist")}
    assert live.keys() == {("state-offset", "elbow"), *missing}
    with pytest.raises(KeyError, match=r"video\.front"):
        Frames.open(policy, folder)


def test_a_set_of_another_robot_is_refused(policy, tmp_path):
    features = {"other": {"dtype": "float32", "shape": (3,)}}
    with Recorder(tmp_path / "set", RATE, features) as recorder:
        recorder.add_frame({"other": np.zeros(3, np.float32)}, "wave")
        recorder.save_episode()
    with pytest.raises(KeyError, match="told"):
        Frames.open(policy, tmp_path / "set", needs_cameras=False)
