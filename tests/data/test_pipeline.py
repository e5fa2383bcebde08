"""What the model sees of a frame: every transform in its order, errors with their place."""

import dataclasses
import pickle

import numpy as np
import pytest

from piston import presets
from piston.data.pipeline import action_names, keys_used, open_source, open_training_data
from piston.data.samples import FakeDataset, TrainingData, check_cache
from piston.models.configs import Pi0FASTConfig
from piston.observation import Observation, stack_samples
from piston.transforms import Group
from piston.transforms.actions import SubsampleActions
from piston.transforms.images import resize_with_pad

from .pipelines import HORIZON, MODEL, TOP, WRIST, data_config, three_joints
from .synthetic import Folder

BOTH = {TOP: "video", WRIST: "video"}


@pytest.fixture(scope="module", params=["v2.1", "v3.0"])
def folder(request, tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("sets") / request.param, request.param, cameras=BOTH)


def open_data(config):
    return TrainingData(open_source(config, MODEL), config, MODEL)


def test_actions_have_the_names_of_the_data_set_or_the_robot(folder):
    config = data_config(folder.root, cameras=("top",))
    source = open_source(config, MODEL)
    feature = source.metadata.features["action"]
    robot = dataclasses.replace(config, robot_metadata={"actions": {"names": ["a", "b", "c"]}})
    for names, pipeline, expected in (
        (["pan", "tilt", "grip"], robot, ("pan", "tilt", "grip")),
        (None, robot, ("a", "b", "c")),
        (["only one"], robot, ("a", "b", "c")),
        (None, config, ("action[0]", "action[1]", "action[2]")),
    ):
        features = {"action": dataclasses.replace(feature, names=names)}
        source.metadata = dataclasses.replace(source.metadata, features=features)
        assert action_names(source, pipeline, 3) == expected


def test_a_sample_is_the_item_through_every_transform(folder):
    config = data_config(folder.root, cameras=("top", "wrist"))
    data, items = open_data(config), open_source(config, MODEL)
    assert len(data) == sum(folder.lengths)
    for index in (0, 10, 11, 12, 35):
        sample, item = data[index], items[index]
        state = item["observation.state"]
        actions = item["action"] - np.array([*state[:2], 0])
        np.testing.assert_allclose(sample["state"][:3], (state - 5) / 2, rtol=1e-5)
        np.testing.assert_allclose(sample["actions"][:, :3], (actions - 5) / 2, rtol=1e-4)
        assert sample["actions"].shape == (HORIZON, 4)
        assert sample["actions"].dtype == sample["state"].dtype == np.float32
        np.testing.assert_array_equal(sample["action_is_pad"], item["action_is_pad"])
        expected = resize_with_pad(item[WRIST], 28, 28)
        np.testing.assert_array_equal(sample["image"]["left_wrist_0_rgb"], expected)
        masks = {name: bool(mask) for name, mask in sample["image_mask"].items()}
        assert masks == {
            "base_0_rgb": True, "left_wrist_0_rgb": True, "right_wrist_0_rgb": False
        }  # fmt: skip
        for key in ("episode_index", "frame_index", "index"):
            assert sample[key] == item[key]
    assert data[11]["action_is_pad"].tolist() == [False] + [True] * 5
    observation = Observation.from_dict(stack_samples([data[0], data[20]]))
    assert observation.batch_size == 2


def test_only_the_cameras_that_are_used_are_read(folder, tmp_path):
    assert open_source(data_config(folder.root), MODEL).cameras == (TOP,)
    everything = data_config(folder.root, repack_transforms=Group(inputs=(lambda data: data,)))
    assert keys_used(everything) is None
    assert open_source(everything, MODEL).cameras == (TOP, WRIST)
    only_top = Folder(tmp_path / "top")
    with pytest.raises(KeyError, match="wrist"):
        open_data(data_config(only_top.root, cameras=("top", "wrist")))[0]


def test_prompts_come_from_the_task_or_from_the_default(folder):
    def said(**changes):
        data = open_data(data_config(folder.root, **changes))
        tokens = [data[index]["tokenized_prompt"] for index in (0, 12)]
        return ["".join(chr(token - 3) for token in row if 3 <= token < 259) for row in tokens]

    default, tasks = said(), said(prompt_from_task=True)
    assert default[0] == default[1]
    assert tasks[0] != tasks[1]


def test_an_error_names_data_set_episode_and_frame(folder):
    def refuse(data):
        raise ValueError(f"no state like {data['state'][0]:.0f}")

    data = open_data(data_config(folder.root, robot=(three_joints, refuse)))
    with pytest.raises(ValueError, match="no state like 14") as caught:
        data[14]
    assert f"in frame 2 of episode 1 of {folder.root}" in caught.value.__notes__
    assert any("refuse" in note for note in caught.value.__notes__)


def test_a_robot_may_drop_the_padding_mask_but_not_lose_it(folder):
    def forgetful(data):
        sample = three_joints(data)
        del sample["action_is_pad"]
        return sample

    data = open_data(data_config(folder.root, robot=(forgetful,)))
    assert data[11]["action_is_pad"].sum() == HORIZON - 1
    thin = open_data(data_config(folder.root, robot=(three_joints, SubsampleActions(2))))
    assert thin[11]["action_is_pad"].tolist() == [False, True, True]
    both = open_data(data_config(folder.root, robot=(forgetful, SubsampleActions(2))))
    with pytest.raises(ValueError, match="6 steps to 3 and dropped 'action_is_pad'"):
        both[11]


def test_it_can_be_pickled(folder):
    data = open_data(data_config(folder.root))
    copy = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(copy[5]["actions"], data[5]["actions"])


def test_a_run_opens_its_data_with_and_without_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PISTON_HOME", str(tmp_path))
    config = data_config(folder.root)
    plain = open_training_data(config, MODEL, episodes=[0, 2])
    cached = open_training_data(config, MODEL, episodes=[0, 2], cache_frames=True)
    assert len(plain) == len(cached) == 27
    for index in range(27):
        one, other = plain[index], cached[index]
        assert one.keys() == other.keys()
        for camera in one["image"]:
            np.testing.assert_array_equal(one["image"][camera], other["image"][camera])
        np.testing.assert_array_equal(one["actions"], other["actions"])


def test_a_robot_that_crops_cannot_use_the_cache(folder):
    def crop(data):
        sample = three_joints(data)
        return {**sample, "image": {k: v[..., 4:, :, :] for k, v in sample["image"].items()}}

    plain = open_data(data_config(folder.root, robot=(crop,)))
    cached = open_data(data_config(folder.root))
    with pytest.raises(ValueError, match="camera 'base_0_rgb' of frame 0 looks different"):
        check_cache(plain, cached)


@pytest.mark.parametrize("name", ["debug", "debug_pi05", "debug_fast"])
def test_fake_samples_have_the_models_shapes(name):
    config = presets.get(name)
    data = open_training_data(config.data_config(), config.model)
    assert isinstance(data, FakeDataset)
    model, sample = config.model, data[3]
    assert set(sample["image"]) == set(sample["image_mask"]) == set(model.cameras)
    assert all(image.shape == (224, 224, 3) for image in sample["image"].values())
    assert sample["actions"].shape == (model.action_horizon, model.action_dim)
    tokens, mask = sample["tokenized_prompt"], sample["tokenized_prompt_mask"]
    assert tokens.shape == mask.shape == (model.prompt_length,)
    assert tokens.dtype == np.int32
    assert (tokens[mask] < model.vocab_size).all()
    assert (tokens[~mask] == 0).all()
    assert ("token_loss_mask" in sample) == isinstance(model, Pi0FASTConfig)
    for key in ("state", "actions", "tokenized_prompt"):
        np.testing.assert_array_equal(sample[key], data[3][key])
        assert not np.array_equal(sample[key], data[4][key])
    Observation.from_dict(stack_samples([data[0], data[1]]))
    with pytest.raises(IndexError):
        data[len(data)]
