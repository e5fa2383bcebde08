"""Renaming keys."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piston.transforms import RepackTransform, flatten_dict

# A busy machine is no failure.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ALOHA = RepackTransform(
    {"images": {"cam_high": "observation.images.top"}, "state": "observation.state"}
)


def test_repack_renames_nests_and_drops():
    item = {"observation.images.top": "pixels", "observation.state": "joints", "index": 3}
    assert ALOHA(item) == {"images": {"cam_high": "pixels"}, "state": "joints"}


def test_repack_reaches_into_nested_dictionaries():
    repack = RepackTransform({"image": "observation/images/top", "all": "observation"})
    item = {"observation": {"images": {"top": "pixels"}}}
    assert repack(item) == {"image": "pixels", "all": {"images": {"top": "pixels"}}}


def test_repack_takes_keys_that_hold_the_separator():
    assert RepackTransform({"a": "observation/image"})({"observation/image": 1}) == {"a": 1}


def test_missing_key_suggests_the_nearest():
    with pytest.raises(KeyError) as error:
        ALOHA({"observation.image.top": 0, "observation.state": 0})
    assert "RepackTransform (for 'cam_high'): key 'observation.images.top' is missing." in str(
        error.value
    )
    assert "Did you mean 'observation.image.top'?" in str(error.value)


def test_structure_must_name_keys():
    with pytest.raises(TypeError, match=r"'images/top' must name a key of the data, found 3"):
        RepackTransform({"images": {"top": 3}})


names = st.text("abc.", min_size=1, max_size=3)
trees = st.recursive(
    st.integers() | st.just({}), lambda inner: st.dictionaries(names, inner, max_size=3)
)


@RELAXED
@given(st.dictionaries(names, trees, max_size=3))
def test_a_flat_dictionary_has_every_leaf_under_its_path(tree):
    rebuilt = {}
    for path, leaf in flatten_dict(tree).items():
        *parents, name = path.split("/")
        node = rebuilt
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    assert rebuilt == tree


def test_ambiguous_names_are_refused():
    with pytest.raises(ValueError, match="both be called 'a/b'"):
        flatten_dict({"a": {"b": 1}, "a/b": 2})


def test_the_prompt_and_the_padding_mask_always_travel_along():
    data = {"action": 1, "prompt": "fold", "action_is_pad": [False], "other": 2}
    repacked = RepackTransform({"actions": "action"})(data)
    assert repacked == {"actions": 1, "prompt": "fold", "action_is_pad": [False]}
