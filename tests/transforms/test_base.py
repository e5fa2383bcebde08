"""Chaining, refusing, and never touching what was given."""

import copy
import dataclasses

import numpy as np
import pytest

from piston.transforms import (
    Group,
    RepackTransform,
    compose,
    require,
    require_mapping,
    require_numbers,
)
from piston.transforms.actions import (
    AbsoluteActions,
    DeltaActions,
    PadStatesAndActions,
    SubsampleActions,
)
from piston.transforms.images import FillCameras, ResizeImages
from piston.transforms.normalize import Normalize, NormStats, Unnormalize


@dataclasses.dataclass(frozen=True)
class Append:
    letter: str

    def __call__(self, data):
        return {**data, "text": data["text"] + self.letter}


def test_push_appends_inputs_and_prepends_outputs():
    group = Group(inputs=[Append("a")], outputs=[Append("A")])
    pushed = group.push(inputs=[Append("b")], outputs=[Append("B")])

    assert compose(pushed.inputs)({"text": ""})["text"] == "ab"
    assert compose(pushed.outputs)({"text": ""})["text"] == "BA"
    assert group == Group(inputs=(Append("a"),), outputs=(Append("A"),)), "push changed the group"


def test_class_in_place_of_instance_is_refused():
    with pytest.raises(TypeError, match=r"Append is a class; .* Append\(\)"):
        Group(inputs=[Append])
    with pytest.raises(TypeError, match="not a transform"):
        compose([None])


def test_error_says_which_transform():
    chain = compose([Append("a"), compose([DeltaActions([True])])])
    with pytest.raises(ValueError, match="shape") as error:
        chain({"text": "", "state": np.zeros(1), "actions": np.zeros(1)})
    assert error.value.__notes__ == [
        "in transform DeltaActions (1 of 1)",
        "in transform CompositeTransform (2 of 2)",
    ]


def test_missing_key_names_what_there_is():
    with pytest.raises(KeyError) as error:
        require({"stat": 1, "images": 2}, "state", "Someone")
    assert (
        str(error.value)
        == "Someone: key 'state' is missing. Did you mean 'stat'? Found 'images', 'stat'."
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 7)), r"Someone: 'state' has shape \(2, 7\); expected \(…, 14\)"),
        (np.float64(1.0), r"shape \(\)"),
        (np.array(["a"] * 14), r"'state' has dtype <U1; expected numbers"),
        (np.ones(14, bool), "dtype bool"),
    ],
)
def test_bad_vector_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        require_numbers({"state": value}, "state", "Someone", 14)


def test_vector_takes_lists_and_integers():
    np.testing.assert_array_equal(require_numbers({"s": [1, 2]}, "s", "Someone", 2), [1, 2])


def test_chunk_needs_a_horizon():
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \(…, horizon, 3\)"):
        require_numbers({"actions": np.zeros(3)}, "actions", "Someone", 3, axes=2)


def test_mapping_is_required():
    with pytest.raises(ValueError, match="'image' is a ndarray; expected a dictionary"):
        require_mapping({"image": np.zeros(3)}, "image", "Someone")


STATS = {
    key: NormStats(np.ones(3), np.full(3, 2.0), np.zeros(3), np.ones(3))
    for key in ("state", "actions")
}


@pytest.mark.parametrize("leading", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize(
    "transform",
    [
        RepackTransform({"image": {"base": "image/base"}, "state": "state"}),
        DeltaActions((True, False, True)),
        AbsoluteActions((True, False, True)),
        SubsampleActions(2),
        PadStatesAndActions(5),
        ResizeImages(4, 4),
        FillCameras(("base", "wrist"), True, 6, 8),
        Normalize(STATS),
        Normalize(STATS, use_quantiles=True),
        Unnormalize(STATS),
        Unnormalize(STATS, use_quantiles=True),
    ],
    ids=repr,
)
def test_transforms_are_pure(transform, leading):
    random = np.random.default_rng(0)
    data = {
        "image": {"base": random.integers(256, size=(*leading, 6, 8, 3), dtype=np.uint8)},
        "image_mask": {"base": np.ones(leading, bool)},
        "state": random.normal(size=(*leading, 3)),
        "actions": random.normal(size=(*leading, 4, 3)),
    }
    before = copy.deepcopy(data)
    result = transform(data)
    np.testing.assert_equal(data, before)
    assert result is not data
