"""Normalisation and its file."""

import json
import logging
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.logs import forget_warnings
from piston.transforms import normalize
from piston.transforms.normalize import (
    Normalize,
    NormStats,
    Unnormalize,
    constant_dimensions,
    read_norm_stats,
    write_norm_stats,
)

# A busy machine is no failure.
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def cases(small_reference):
    with np.load(small_reference / "transforms.npz") as file:
        return dict(file)


@pytest.mark.parametrize("use_quantiles", [False, True])
def test_meets_the_reference(cases, use_quantiles):
    stats = {"x": NormStats(*(cases[f"norm/{name}"] for name in ("mean", "std", "q01", "q99")))}
    found = Normalize(stats, use_quantiles)({"x": cases["norm/x"]})["x"]
    expected = cases[f"norm/normalized_quantile_{use_quantiles}"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)

    found = Unnormalize(stats, use_quantiles)({"x": cases["norm/wide_x"]})["x"]
    expected = cases[f"norm/unnormalized_wide_quantile_{use_quantiles}"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@st.composite
def values_and_stats(draw):
    leading = draw(hnp.array_shapes(min_dims=0, max_dims=3, max_side=3))
    dim = draw(st.integers(1, 5))
    moderate = st.floats(-10, 10)
    mean, q01 = (draw(hnp.arrays(np.float64, dim, elements=moderate)) for _ in range(2))
    std, width = (draw(hnp.arrays(np.float64, dim, elements=st.floats(0, 10))) for _ in range(2))
    values = draw(hnp.arrays(np.float64, (*leading, dim), elements=moderate))
    return values, NormStats(mean, std, q01, q01 + width)


@RELAXED
@given(values_and_stats(), st.booleans(), st.sampled_from([0.0, 0.01]), st.integers(0, 3))
def test_unnormalize_undoes_normalize(sample, use_quantiles, floor, padding):
    values, stats = sample
    options = {"use_quantiles": use_quantiles, "floor": floor}
    normalized = Normalize({"x": stats}, **options)({"x": values})["x"]
    padded = np.concatenate([normalized, np.zeros((*values.shape[:-1], padding))], axis=-1)
    restored = Unnormalize({"x": stats}, **options)({"x": padded})["x"]
    np.testing.assert_allclose(restored[..., : stats.dim], values, atol=1e-8)
    assert not restored[..., stats.dim :].any()


def test_float32_stays_float32_and_is_computed_in_float64():
    # 1000 ± 0.01: in float32 the difference alone would be wrong in the third digit.
    stats = {"x": NormStats([1000.0123], [0.01])}
    values = np.array([1000.02], np.float32)
    found = Normalize(stats)({"x": values})["x"]
    assert found.dtype == np.float32
    exact = (float(values[0]) - 1000.0123) / (0.01 + 1e-6)
    np.testing.assert_allclose(found, [exact], rtol=1e-6)
    assert Unnormalize(stats)({"x": found})["x"].dtype == np.float32
    assert Normalize(stats)({"x": np.array([1000])})["x"].dtype == np.float64


def test_nothing_is_clipped():
    stats = {"x": NormStats([0.0], [1.0], [-1.0], [1.0])}
    assert Normalize(stats, use_quantiles=True)({"x": np.array([50.0])})["x"] > 49


def test_floor_tames_a_dimension_that_never_moves():
    stats = {"x": NormStats([0.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.0, 1.0])}
    noise = {"x": np.array([1e-3, 1e-3])}
    for use_quantiles in (False, True):
        wild = Normalize(stats, use_quantiles)(noise)["x"]
        tame = Normalize(stats, use_quantiles, floor=0.1)(noise)["x"]
        start = -1 if use_quantiles else 0
        assert wild[0] > 900
        np.testing.assert_allclose(tame[0] - start, 0.01, rtol=1e-4)
        assert tame[1] == wild[1], "a dimension that moves was changed"
    with pytest.raises(ValueError, match="negative"):
        Normalize(stats, floor=-1.0)


def test_constant_dimensions_are_found():
    stats = {
        "state": NormStats([0, 0, 0], [0, 1, 1e-9], [0, 0, 0], [1, 0, 1]),
        "actions": NormStats([0], [1], [0], [1]),
    }
    assert constant_dimensions(stats) == {"state": [0, 2]}
    assert constant_dimensions(stats, use_quantiles=True) == {"state": [1]}


def test_keys_without_statistics_pass_and_actions_may_be_absent():
    stats = {key: NormStats([1.0], [1.0]) for key in ("state", "actions")}
    data = {"state": np.ones(1), "prompt": "fold"}
    assert Normalize(stats)(data) == {"state": 0.0, "prompt": "fold"}
    with pytest.raises(KeyError, match="Unnormalize: key 'actions' is missing"):
        Unnormalize(stats)(data)


def test_statistics_narrower_than_the_data_are_refused():
    with pytest.raises(ValueError, match=r"'state' has 3 dimensions .* its statistics 2"):
        Normalize({"state": NormStats([0, 0], [1, 1])})({"state": np.zeros(3)})


@pytest.mark.parametrize("kind", [Normalize, Unnormalize])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.where(np.arange(14) == 3, np.nan, 0), r"'state' holds NaN or infinity at 3 \(shape"),
        (np.full((2, 14), np.inf), r"at \(0, 0\), \(0, 1\), .* and 20 more"),
        (np.array(["a"] * 14), r"'state' has dtype <U1; expected numbers"),
        (np.float64(1.0), r"'state' has shape \(\); expected \(…, dim\)"),
    ],
)
def test_values_that_are_not_finite_numbers_are_refused(kind, value, message):
    stats = {"state": NormStats(np.zeros(14), np.ones(14))}
    with pytest.raises(ValueError, match=f"{kind.__name__}: .*{message}".replace(": .*'", ": '")):
        kind(stats)({"state": value})


def test_padded_statistics_lend_their_first_dimensions(caplog):
    padded = {"state": NormStats([1, 2, 0, 0], [1, 2, 0, 0])}
    plain = {"state": NormStats([1, 2], [1, 2])}
    data = {"state": np.array([3.0, 5.0])}
    for kind in (Normalize, Unnormalize):
        np.testing.assert_array_equal(kind(padded)(data)["state"], kind(plain)(data)["state"])
    assert not caplog.records


def test_statistics_of_another_robot_are_noticed(caplog):
    forget_warnings()
    stats = {"state": NormStats([0, 0], [1, 1])}
    for _ in range(3):
        with caplog.at_level(logging.WARNING):
            Normalize(stats)({"state": np.zeros(1)})
    assert len(caplog.records) == 1
    assert "'state' has 1 dimensions, its statistics 2" in caplog.text
    with pytest.raises(ValueError, match="its statistics 2"):
        Unnormalize(stats)({"state": np.zeros(1)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [1, 1]), "one size"),
        (([0], [1], [0]), "both quantiles"),
        (([np.nan], [1]), "finite"),
        (([[0]], [[1]]), "list of finite numbers"),
        (([0], [-1]), "negative"),
    ],
)
def test_impossible_statistics_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NormStats(*arguments)


def test_quantiles_must_be_there_to_be_used():
    with pytest.raises(ValueError, match=r"needs q01 and q99; the statistics of \['state'\]"):
        Normalize({"state": NormStats([0], [1])}, use_quantiles=True)


def test_released_file_is_written_back_byte_for_byte(small_reference, tmp_path):
    folder = small_reference / "norm_stats" / "trossen"
    stats = read_norm_stats(folder)
    assert stats["state"].dim == 14
    path = write_norm_stats(tmp_path / "new" / "folder", stats)
    assert path.read_bytes() == (folder / "norm_stats.json").read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["norm_stats.json"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (0.0001, "0.0001"),
        # These three are as found in public files.
        (0.00002679409590200521, "0.00002679409590200521"),
        (5.178331679376605e-6, "5.178331679376605e-6"),
        (6.501830672824839e-8, "6.501830672824839e-8"),
        (-1e-5, "-0.00001"),
        (1e15, "1000000000000000.0"),
        (1.5e16, "1.5e16"),
    ],
)
def test_numbers_are_written_as_in_public_files(tmp_path, number, text):
    path = write_norm_stats(tmp_path, {"x": NormStats([number], [1.0])})
    assert path.read_text() == (
        '{\n  "norm_stats": {\n    "x": {\n      "mean": [\n        ' + text + "\n      ],\n"
        '      "std": [\n        1.0\n      ],\n      "q01": null,\n      "q99": null\n'
        "    }\n  }\n}"
    )


@RELAXED
@given(values_and_stats(), st.floats(-1e20, 1e20))
def test_what_was_written_is_read_back_equal(tmp_path_factory, sample, number):
    folder = tmp_path_factory.mktemp("stats")
    stats = {"zustand": sample[1], "actions": NormStats([number], [abs(number)])}
    write_norm_stats(folder, stats)
    found = read_norm_stats(folder)
    assert found == stats
    assert list(found) == list(stats)
    assert json.loads((folder / "norm_stats.json").read_text())
    shutil.rmtree(folder)


def test_equality_looks_at_every_field():
    stats = NormStats([0], [1], [0], [1])
    assert stats == NormStats([0.0], [1.0], [0.0], [1.0])
    assert stats != NormStats([0], [1])
    assert stats != NormStats([0], [1], [0], [2])


def test_missing_file_says_what_to_do(tmp_path):
    folder = tmp_path / "trossen"
    with pytest.raises(FileNotFoundError, match=r"missing in .*trossen\. There is no such folder"):
        read_norm_stats(folder)
    folder.mkdir()
    (folder / "stats.json").touch()
    with pytest.raises(FileNotFoundError) as error:
        read_norm_stats(folder)
    assert str(error.value) == (
        f"norm_stats.json missing in {folder}. Found there: stats.json. Run: piston stats PRESET"
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"norm_stats": {"state"',
        "[]",
        "{}",
        '{"norm_stats": {"state": {"mean": [0]}}}',
        '{"norm_stats": {"state": {"mean": [0], "std": ["a"]}}}',
        '{"norm_stats": {"state": {"mean": [NaN], "std": [1]}}}',
        '{"norm_stats": [1]}',
    ],
)
def test_broken_file_is_named(tmp_path, text):
    (tmp_path / "norm_stats.json").write_text(text)
    with pytest.raises(ValueError, match=r"norm_stats\.json is not a statistics file"):
        read_norm_stats(tmp_path)


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_norm_stats(tmp_path, {"x": NormStats([0], [1])})
    before = (tmp_path / "norm_stats.json").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(normalize.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_norm_stats(tmp_path, {"x": NormStats([5], [5])})
    assert (tmp_path / "norm_stats.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1
