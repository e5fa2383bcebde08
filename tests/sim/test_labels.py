"""Subtasks and questions: they agree with the state and with the pixels."""

import itertools

import numpy as np
import pytest

pytest.importorskip("gym_aloha", reason="needs the extra `sim`")

from piston.sim import make_environment, make_expert
from piston.sim.labels import border_distance
from piston.sim.metaworld_tasks import MIXTURES, TASKS

LEFT_GRIPPER, RIGHT_GRIPPER = 6, 13


@pytest.mark.parametrize(
    ("subtasks", "distances"),
    [
        ("aaabb", [3, 2, 1, 1, 2]),
        ("abbbba", [1, 1, 2, 2, 1, 1]),
        ("aaaaab", [5, 4, 3, 2, 1, 1]),
        ("aaa", [3, 3, 3]),
        ("a", [1]),
        ("", []),
    ],
)
def test_the_distance_to_a_border_counts_frames(subtasks, distances):
    assert border_distance(list(subtasks)).tolist() == distances


class Episode:
    """A demonstration without images: what each of its frames shows and says."""

    def __init__(self, environment, expert, seed, measure):
        environment.reset(seed)
        expert.start(environment)
        self.subtasks, self.answers, measured = [], [], []
        while not environment.done and (step := expert.act()) is not None:
            self.subtasks.append(step.subtask)
            self.answers.append({x.question: x.answer for x in environment.questions()})
            measured.append(measure())
            environment.step(step.executed)
        assert environment.held
        self.measured = np.array(measured)
        self.parts = [name for name, _ in itertools.groupby(self.subtasks)]

    def start(self, subtask):
        return self.subtasks.index(subtask)

    def answered(self, question):
        """The answers without repetition, in order."""
        given = (answers[question] for answers in self.answers if question in answers)
        return [answer for answer, _ in itertools.groupby(given)]


@pytest.fixture
def run(monkeypatch):
    environments = []

    def start(name):
        environment, expert = make_environment(name), make_expert(name)
        observation = environment.reset(0)
        monkeypatch.setattr(environment, "observe", lambda: observation)
        environments.append(environment)
        return environment, expert

    yield start
    for environment in environments:
        environment.close()


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_the_parts_of_the_transfer_begin_where_it_shows(run, seed):
    environment, expert = run("aloha_transfer_cube")
    data = environment._current().data
    # The state, then the position of the cube.
    episode = Episode(
        *(environment, expert, seed),
        lambda: np.append(environment._state(), data.qpos[16:19]),
    )
    reach, grasp, bring, approach, hand_over, apart = episode.parts
    at = {part: episode.start(part) for part in episode.parts}
    assert at[reach] == 0
    left, right = episode.measured[:, LEFT_GRIPPER], episode.measured[:, RIGHT_GRIPPER]
    x, height = episode.measured[:, 14], episode.measured[:, 16]
    # The right gripper begins to close, and has closed before the cube rises.
    assert right[at[grasp]] > 0.95
    assert right[at[grasp] + 10] < right[at[bring]] + 0.05 < 0.7
    assert height[at[grasp] : at[bring]].max() < 0.021
    assert height[at[bring] + 20] > 0.06
    # The left arm, which has waited, comes in; then its gripper begins to close.
    joints = episode.measured[:, :6]
    assert np.abs(joints[at[approach]] - joints[at[approach] - 5]).max() < 0.02
    assert np.abs(joints[at[hand_over]] - joints[at[approach]]).max() > 0.3
    assert np.abs(joints[at[hand_over] + 10] - joints[at[hand_over]]).max() < 0.1
    assert left[at[hand_over]] > 0.9
    assert left[at[hand_over] + 12] < 0.6
    # The right gripper has opened, and the cube leaves to the left.
    assert right[at[apart] - 15] < 0.65
    assert right[at[apart]] > 0.75
    assert abs(x[at[apart]]) < 0.01
    assert x[-1] < -0.05
    assert episode.answered("which hand holds the cube?") == ["neither", "right", "both", "left"]
    assert episode.answered("is the cube on the table?") == ["yes", "no"]
    assert episode.answered("where is the cube?")[-2:] == ["in the middle", "on the left"]


@pytest.mark.parametrize("seed", [11, 12])
def test_the_parts_of_the_insertion_begin_where_it_shows(run, seed):
    environment, expert = run("aloha_insertion")
    data = environment._current().data
    episode = Episode(
        *(environment, expert, seed),
        lambda: np.append(environment._state(), data.qpos[16:]),
    )
    reach, grasp, bring, insert = episode.parts
    at = {part: episode.start(part) for part in episode.parts}
    assert at[reach] == 0
    grippers = episode.measured[:, [LEFT_GRIPPER, RIGHT_GRIPPER]]
    peg, socket = episode.measured[:, 14:17], episode.measured[:, 21:24]
    assert grippers[at[grasp]].min() > 0.95
    # The fingers have closed, the right ones just now, and both parts still lie there.
    assert np.abs(grippers[at[bring] + 8] - grippers[at[bring]]).max() < 0.02
    assert (grippers[at[bring] - 8] - grippers[at[bring]]).max() > 0.1
    assert max(peg[at[bring], 2], socket[at[bring], 2]) < 0.03
    # Both are in front of each other; from here on they only come closer.
    assert np.abs(peg[at[insert]] - socket[at[insert]])[1:].max() < 0.02
    assert peg[at[insert], 2] > 0.15
    apart = np.linalg.norm(peg - socket, axis=1)
    assert apart[at[insert]] > 0.18 > 0.11 > apart[-1]
    assert episode.answered("is the peg on the table?") == ["yes", "no"]
    assert episode.answered("is the peg in the socket?") == ["no", "yes"]


@pytest.mark.parametrize("name", MIXTURES["tiny"])
def test_the_parts_of_metaworlds_tasks_begin_at_the_thing(run, name):
    environment, expert = run(f"metaworld:{name}")
    parts = TASKS[name].parts

    def measure():
        """Where the thing is, and how far away the hand."""
        hand, thing = environment.full_observation[:3], environment.full_observation[4:7]
        joint = environment._package.data.joint(parts.thing.joint).qpos[0]
        return joint, np.linalg.norm(hand - thing)

    for seed in range(20, 23):
        episode = Episode(environment, expert, seed, measure)
        # A disturbed hand may lose the handle and reach for it again.
        assert episode.parts[:2] == [parts.reach, parts.move]
        assert episode.subtasks[-1] == parts.move
        assert set(episode.parts) == {parts.reach, parts.move}
        joint, apart = episode.measured.T
        begin = episode.start(parts.move)
        assert begin >= 5
        assert apart[begin] < 0.11
        # The thing begins to move, and most of its motion is still to come.
        progress = (joint - joint[0]) / (joint[-1] - joint[0])
        assert progress[begin] < 0.5
        assert progress[begin + 6] > progress[begin] + 0.1
        answered = episode.answered(parts.thing.question)
        expected = {"open": ["half open", "yes"], "close": ["half open", "no"]}
        assert answered == expected.get(name.split("-")[1], ["no", "yes"])


def test_other_tasks_have_no_parts(run):
    environment, expert = run("metaworld:door-close")
    environment.reset(0)
    expert.start(environment)
    assert expert.act().subtask == ""
    questions = {question.question for question in environment.questions()}
    assert questions == {"where is the hand?", "is the gripper open?"}


def test_labels_are_short():
    """Small models write them byte by byte."""
    for task in TASKS.values():
        if task.parts is not None:
            assert max(len(task.parts.reach), len(task.parts.move)) <= 24
    for name in ("aloha_transfer_cube", "aloha_insertion", "metaworld:tiny"):
        environment, expert = make_environment(name, pixels=8), make_expert(name)
        environment.reset(0)
        expert.start(environment)
        assert len(expert.act().subtask) <= 24
        for camera, question, answer in environment.questions():
            assert camera in environment.cameras.values()
            assert question.endswith("?")
            assert len(answer) <= 20
        environment.close()


def _centre(weights):
    """Column and row of the centre of the pixels, from 0 to 1."""
    rows, columns = np.indices(weights.shape) + 0.5
    assert weights.max() > 80
    return np.array([(weights * x).sum() / weights.sum() for x in (columns, rows)]) / len(weights)


def _channels(environment):
    (image,) = environment.observe()["images"].values()
    return np.moveaxis(image.astype(float), -1, 0)


def _answers(environment):
    return {question.question: question.answer for question in environment.questions()}


SIDES = {"on the left": (0, 0.4), "in the middle": (0.4, 0.6), "on the right": (0.6, 1)}


@pytest.mark.parametrize("anywhere", [False, True])
def test_the_cube_is_where_the_answer_says(anywhere):
    environment = make_environment("aloha_transfer_cube")
    random, sides, lows = np.random.default_rng(0), [], []
    for seed in range(20):
        environment.reset(seed)
        if anywhere:
            pose = environment.pose()
            pose[16:19] = *random.uniform((-0.28, 0.4), (0.28, 0.85)), 0.02
            environment.set_pose(pose)
        red, green, _ = _channels(environment)
        column, row = _centre(np.maximum(red - green, 0))
        answers = _answers(environment)
        if side := answers.get("where is the cube?"):
            low, high = SIDES[side]
            assert low < column < high
            sides.append(side)
        if low := answers.get("is the cube low in the image?"):
            assert (low == "yes") == (row > 0.66)
            lows.append(low)
    assert len(sides) >= 14
    assert set(sides) == set(SIDES) - (set() if anywhere else {"on the left"})
    assert len(lows) >= 14
    assert 0.2 < lows.count("yes") / len(lows) < 0.8


def test_the_higher_part_is_higher_in_the_image():
    environment, answers = make_environment("aloha_insertion"), []
    for seed in range(20):
        environment.reset(seed)
        red, green, blue = _channels(environment)
        peg, socket = (_centre(np.maximum(colour - green, 0))[1] for colour in (red, blue))
        if answer := _answers(environment).get("which is higher in the image?"):
            assert answer == ("the peg" if peg < socket else "the socket")
            answers.append(answer)
    assert len(answers) >= 12
    assert len(set(answers)) == 2


def test_the_hand_is_where_the_answer_says():
    environment = make_environment("metaworld:button-press-topdown")
    expert, sides = make_expert(environment.name), []
    environment.reset(3)
    expert.start(environment)
    while (step := expert.act()) is not None:
        side = _answers(environment).get("where is the hand?")
        if environment.steps % 3 == 0 and side:
            red, green, blue = _channels(environment)
            low, high = SIDES[side]
            # One of its fingers is light blue, and less than a tenth of the image wide.
            assert (
                low - 0.05
                < _centre(np.maximum(np.minimum(green, blue) - red - 40, 0))[0]
                < high + 0.05
            )
            sides.append(side)
        environment.step(step.executed)
    assert set(sides) == set(SIDES)
    environment.close()
