"""MetaWorld: sentences, starts that do not tell, experts."""

import numpy as np
import pytest

pytest.importorskip("metaworld", reason="needs the extra `sim`")
from metaworld.policies import ENV_POLICY_MAP

from piston.sim import make_environment, make_expert
from piston.sim.metaworld_tasks import MIXTURES, TASKS
from piston.sim.recording import demonstrate

TINY = MIXTURES["tiny"]


def test_every_task_of_the_package_has_a_sentence_of_its_own():
    package = [task for task in TASKS.values() if task.start is None]
    assert {task.package_name for task in package} == set(ENV_POLICY_MAP)
    assert len({task.prompt for task in package}) == len(package)


@pytest.mark.parametrize("thing", ["drawer", "window"])
def test_only_the_sentence_tells_opposites_apart(thing):
    names = [f"metaworld:{thing}-{verb}-halfway" for verb in ("open", "close")]
    opening, closing = map(make_environment, names)
    for seed in range(3):
        one, other = opening.reset(seed), closing.reset(seed)
        np.testing.assert_array_equal(one["images"]["corner4"], other["images"]["corner4"])
        np.testing.assert_array_equal(one["state"], other["state"])
        assert one["prompt"] == closing.opposite_prompt == f"open the {thing}"
        assert other["prompt"] == opening.opposite_prompt == f"close the {thing}"
        # Nothing is done yet, nor will be by waiting.
        for environment in (opening, closing):
            assert not any(environment.step(np.zeros(4)).success for _ in range(5))
    opening.close()
    closing.close()


@pytest.mark.parametrize("name", ["drawer-open", "window-close", "reach", "push"])
def test_the_goal_is_not_in_the_picture(name):
    environment = make_environment(f"metaworld:{name}")
    environment.reset(seed=0)
    package = environment._package
    before = environment.render(128, 128)
    for index in range(package.model.nsite):
        package.data.site_xpos[index] += (0.0, 0.0, 0.1)
        package.model.site_rgba[index] = (0, 1, 0, 1)
    np.testing.assert_array_equal(environment.render(128, 128), before)
    environment.close()


def test_the_state_does_not_tell_where_things_are():
    environment = make_environment("metaworld:button-press-topdown")
    states, places = set(), set()
    for seed in range(4):
        states.add(environment.reset(seed)["state"].tobytes())
        places.add(environment.full_observation[4:7].tobytes())
    assert len(states) == 1
    assert len(places) == 4
    environment.close()


def test_a_mixture_takes_its_tasks_in_turn_and_shares_starts():
    mixture = make_environment("metaworld:tiny", pixels=8)
    single = make_environment("metaworld:window-close-halfway", pixels=8)
    prompts = [mixture.reset(seed)["prompt"] for seed in range(10)]
    assert prompts == [TASKS[name].prompt for name in TINY] * 2
    mixture.reset(5 * 4 + TINY.index("window-close-halfway"))
    single.reset(4)
    ours, theirs = mixture.initial_state(), single.initial_state()
    assert ours["random_vector"] == theirs["random_vector"]
    assert ours["task"] == theirs["task"] == "window-close-halfway"
    assert mixture.max_steps == 100
    mixture.close()
    single.close()


def test_a_closed_environment_leaves_its_world_to_the_next():
    first = make_environment("metaworld:door-open", pixels=8)
    first.reset(0)
    package = first._package
    first.close()
    second = make_environment("metaworld:door-open", pixels=8)
    second.reset(0)
    assert second._package is package
    with pytest.raises(ValueError, match="no episode has started"):
        first.observe()
    with pytest.raises(ValueError, match="Call reset"):
        first.step(np.zeros(4))
    second.close()


@pytest.mark.parametrize("name", TINY)
def test_the_expert_succeeds(name, monkeypatch):
    environment, expert = make_environment(f"metaworld:{name}"), make_expert(f"metaworld:{name}")
    observation = environment.reset(0)
    monkeypatch.setattr(environment, "observe", lambda: observation)
    episodes = [demonstrate(environment, expert, seed) for seed in range(700, 705)]
    assert sum(episode.success for episode in episodes) >= 4
    environment.close()


def test_three_of_four_episodes_are_disturbed_and_labels_are_clean():
    environment = make_environment("metaworld:button-press-topdown", pixels=8)
    expert = make_expert(environment.name)
    disturbed = []
    for seed in range(40):
        environment.reset(seed)
        expert.start(environment)
        step = expert.act()
        assert np.abs(step.executed).max() <= 1
        assert np.abs(step.label).max() <= 1
        disturbed.append(not np.array_equal(step.executed, step.label))
        # Undisturbed and disturbed alike are told to do the same.
        np.testing.assert_array_equal(step.label[2:], expert.act().label[2:])
        environment.close()
    assert 22 <= sum(disturbed) <= 38
