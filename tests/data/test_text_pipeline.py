"""Text that a model learns: from the labels of frames, and from pictures with questions."""

import dataclasses
import pickle

import numpy as np
import pytest

from piston.config import DataConfig, ModelTransformFactory
from piston.data.cache import CachedFrames
from piston.data.pipeline import (
    open_source,
    open_sources,
    open_training_data,
    require_short_texts,
    split_sources,
)
from piston.data.samples import TrainingData
from piston.observation import Observation, stack_samples
from piston.robots.image_text import ImageTextDataConfig
from piston.tokenizers.text import BytesTokenizer
from piston.transforms import Group
from piston.transforms.normalize import NormStats

from .pipelines import HORIZON, MODEL, data_config, three_joints
from .test_image_text import KINDS, TEXTS, make
from .test_language import ASKED, SUBTASKS, record

TEXT = BytesTokenizer()
TEXT_MODEL = dataclasses.replace(MODEL, targets=("text",), max_text_len=20, max_token_len=48)
STATS = {
    key: NormStats(np.zeros(2), np.full(2, 9.0), np.full(2, -9.0), np.full(2, 9.0))
    for key in ("state", "actions")
}
LABELS = [text for one in SUBTASKS for text in one]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return record(tmp_path_factory.mktemp("sets") / "set")


def robot(root, **changes):
    """A robot of two joints that writes subtasks."""
    return data_config(
        root,
        **{
            "data_transforms": Group(inputs=(three_joints,)),
            "norm_stats": STATS,
            "subtasks": True,
            "model_transforms": ModelTransformFactory("tidy up", subtasks=True)(TEXT_MODEL),
            **changes,
        },
    )


def pictures(root, model=TEXT_MODEL, **options):
    return ImageTextDataConfig(repo_id=str(root), **options).create(root, model)


def read(sample):
    """The prompt, what is to be written, and how many tokens are learned."""
    tokens, real = sample["tokenized_prompt"], sample["tokenized_prompt_mask"]
    written = sample["token_ar_mask"].astype(bool)
    texts = (TEXT.decode(tokens[mask]) for mask in (real & ~written, real & written))
    return (*texts, int(sample["token_loss_mask"].sum()))


def test_labels_reach_the_frames_that_they_are_of(root):
    config = robot(root)
    data = open_training_data(config, TEXT_MODEL)
    assert len(data) == len(LABELS)
    for index, label in enumerate(LABELS):
        prompt = "tidy up\nSubtask: " if label else "tidy up\n"
        assert read(data[index]) == (prompt, label, len(label) + bool(label))
        assert data[index]["action_dims"] == 2
    # Also in another choice of episodes, and in another process.
    later = pickle.loads(pickle.dumps(open_training_data(config, TEXT_MODEL, episodes=[2, 1])))
    assert [read(later[index])[1] for index in range(len(later))] == LABELS[6:]


def test_labels_stay_where_they_are_in_a_cache(root, tmp_path):
    config = robot(root)
    source = open_source(config, TEXT_MODEL)
    frames = CachedFrames(source, TEXT_MODEL.image_size, tmp_path)
    frames.build()
    cached, plain = (TrainingData(one, config, TEXT_MODEL) for one in (frames, source))
    for index in range(len(plain)):
        one, other = plain[index], cached[index]
        assert one.keys() == other.keys()
        for key in ("tokenized_prompt", "token_loss_mask", "token_hidden_mask", "actions"):
            np.testing.assert_array_equal(one[key], other[key])
    assert {read(cached[index])[1] for index in range(len(cached))} == set(LABELS)


def test_a_set_is_read_without_its_labels_if_nobody_asks(root):
    transforms = ModelTransformFactory("tidy up")(TEXT_MODEL)
    data = open_training_data(robot(root, subtasks=False, model_transforms=transforms), TEXT_MODEL)
    assert {read(data[index])[1:] for index in range(len(data))} == {("", 0)}
    plain = open_training_data(
        robot(root, subtasks=False, model_transforms=ModelTransformFactory("tidy up")(MODEL)), MODEL
    )
    assert not {key for key in plain[0] if key.startswith("token_")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_pictures(tmp_path, kind):
    config = pictures(make(tmp_path / "set", kind))
    data = open_training_data(config, TEXT_MODEL, cache_frames=True)
    assert len(data) == 3
    for index, (question, answer) in enumerate(TEXTS):
        sample, answer = data[index], answer.replace("\n", " ")
        learned = len(answer.encode()) + 1
        assert read(sample) == (f"Question: {question}\nAnswer: ", answer, learned)
        assert sample["action_dims"] == 0
        assert sample["action_is_pad"].all()
        assert sample["actions"].shape == (HORIZON, MODEL.action_dim)
        assert not sample["actions"].any()
        assert not sample["state"].any()
        masks = {name: bool(mask) for name, mask in sample["image_mask"].items()}
        assert masks == {
            "base_0_rgb": True, "left_wrist_0_rgb": False, "right_wrist_0_rgb": False
        }  # fmt: skip
        assert (sample["episode_index"], sample["frame_index"]) == (0, index)
        assert {image.shape for image in sample["image"].values()} == {(28, 28, 3)}
        assert sample["image"]["base_0_rgb"].max() == 200  # the picture's blue


def test_questions_of_a_robots_set(root):
    data = open_training_data(pictures(root, slot="left_wrist_0_rgb"), TEXT_MODEL)
    found = sorted(read(data[index])[:2] for index in range(len(data)))
    expected = [(f"Question: {one.question}\nAnswer: ", one.answer) for _, one in ASKED]
    assert found == sorted(expected)
    assert data[0]["image"]["left_wrist_0_rgb"].max() > 50
    assert not data[0]["image_mask"]["base_0_rgb"]
    some = open_training_data(pictures(root), TEXT_MODEL, episodes=[2])
    assert len(some) == 1


def test_all_kinds_of_samples_make_one_batch(root, tmp_path):
    table = make(tmp_path / "set", "lines")
    configs = [robot(root), pictures(table), pictures(root)]
    samples = [open_training_data(one, TEXT_MODEL)[2] for one in configs]
    batch = stack_samples(samples)
    assert Observation.from_dict(batch).batch_size == 3
    assert batch["action_dims"].tolist() == [2, 0, 0]
    assert batch["token_loss_mask"].any(1).tolist() == [True, True, True]


def test_held_out_episodes_are_validated_on_where_there_are_actions(root):
    sources = open_sources([pictures(root), robot(root)], TEXT_MODEL)
    asking = [DataConfig(has_actions=False), DataConfig()]
    (asked, none), (kept, chosen) = split_sources(asking, sources, 1, seed=3)
    assert asked == kept
    assert (len(kept), len(chosen), none) == (2, 1, [])
    first, second = split_sources([DataConfig()] * 2, sources, 1, seed=3)
    assert (first, second) == ((kept, chosen), (kept, []))


def test_sets_of_questions_need_not_be_alike(root, tmp_path):
    """They have no actions, and may be of different robots."""
    other = record(tmp_path / "other", episodes=range(1), robot_type="another")
    path = other / "meta/info.json"
    path.write_text(path.read_text().replace('"fps": 10', '"fps": 5'))
    config = pictures(root, extra_datasets=(str(other), str(make(tmp_path / "set", "bytes"))))
    sources = open_sources(config.each_set(), TEXT_MODEL)
    assert len(sources) == 3


def test_texts_that_are_too_long_are_found_before_they_are_used(root, tmp_path):
    short = dataclasses.replace(TEXT_MODEL, max_text_len=5)
    transforms = ModelTransformFactory("tidy up", subtasks=True)(short)
    config = robot(root, model_transforms=transforms, entry="arm")
    with pytest.raises(ValueError, match="The subtask 'reach' has 5 tokens") as found:
        require_short_texts(open_source(config, short), config)
    assert found.value.__notes__ == [f"in {root} (arm)"]
    for folder, text in ((make(tmp_path / "set", "bytes"), "a cup"), (root, '{"point": [3, 4]}')):
        config = dataclasses.replace(pictures(folder, short), entry="questions")
        with pytest.raises(ValueError, match="The answer ") as found:
            require_short_texts(open_source(config, TEXT_MODEL), config)
        assert text in str(found.value)
        assert found.value.__notes__ == [f"in {folder} (questions)"]
    config = robot(root)
    require_short_texts(open_source(config, TEXT_MODEL), config)


def test_an_error_names_the_question(tmp_path):
    config = dataclasses.replace(pictures(make(tmp_path / "set", "bytes")), entry="pictures")
    short = dataclasses.replace(TEXT_MODEL, max_text_len=1)
    transforms = ModelTransformFactory()(short)
    config = dataclasses.replace(config, model_transforms=transforms)
    with pytest.raises(ValueError, match="The answer '2' has 1 tokens") as found:
        open_training_data(config, short)[2]
    assert found.value.__notes__[1:] == [f"in question 2 of {tmp_path / 'set'} (pictures)"]


def test_what_pictures_cannot_have(root, tmp_path):
    with pytest.raises(ValueError, match="name text in --model.targets"):
        pictures(root, MODEL)
    with pytest.raises(ValueError, match="'base_0_rgg', which is no camera slot.*'base_0_rgb'"):
        pictures(root, slot="base_0_rgg")
    with pytest.raises(ValueError, match="default_prompt, subtasks would do nothing"):
        pictures(root, default_prompt="go", subtasks=True)
    table = make(tmp_path / "set", "lines")
    with pytest.raises(ValueError, match="--data.episodes is set, but .* is a table"):
        open_source(pictures(table, episodes="0:2"), TEXT_MODEL)
    with pytest.raises(ValueError, match="needs a model with text among its --model.targets"):
        ModelTransformFactory(subtasks=True)(MODEL)
