"""Episode statistics against plain NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piston.data.record.columns import (
    NUM_BINS,
    QUANTILES,
    column_stats,
    frame_histogram,
    image_stats,
    merge_stats,
    sampled_frames,
)


def histogram_quantile(values: np.ndarray, quantile: float) -> float:
    """The quantile by its definition: counts in 5,000 bins, then interpolation inside one."""
    edges = np.linspace(values.min() - 1e-10, values.max() + 1e-10, NUM_BINS + 1)
    counts, _ = np.histogram(values, edges)
    cumulative = np.cumsum(counts)
    target = quantile * len(values)
    index = int(np.searchsorted(cumulative, target))
    if index == 0:
        return edges[0]
    fraction = (target - cumulative[index - 1]) / counts[index]
    return edges[index] + fraction * (edges[index + 1] - edges[index])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(0, 1), (1000, 0.01), (-3, 50), (1e7, 1e-3), (5, 0)]),
)
def test_columns(num_frames: int, seed: int, scale: tuple[float, float]) -> None:
    mean, std = scale
    values = np.random.default_rng(seed).normal(mean, std, (num_frames, 3))
    stats = column_stats(values)
    np.testing.assert_array_equal(stats["min"], values.min(axis=0))
    np.testing.assert_array_equal(stats["max"], values.max(axis=0))
    np.testing.assert_allclose(stats["mean"], values.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats["std"], values.std(axis=0), rtol=1e-9, atol=1e-12)
    assert stats["count"] == [num_frames]
    width = (np.ptp(values, axis=0) + 2e-10) / NUM_BINS
    for name, quantile in QUANTILES.items():
        expected = [histogram_quantile(column, quantile) for column in values.T]
        # Rounding may move a value across an edge, never further.
        assert (np.abs(stats[name] - expected) <= width + 1e-8).all()
        assert (stats[name] >= stats["min"] - 1e-9).all()
        assert (stats[name] <= stats["max"] + 1e-9).all()


def test_shapes_follow_the_feature() -> None:
    assert column_stats(np.arange(5))["mean"].shape == (1,)
    assert column_stats(np.zeros((5, 2, 3)))["q10"].shape == (2, 3)
    assert column_stats(np.arange(5))["max"].dtype == np.int64
    assert column_stats(np.array([True, False]))["mean"] == [0.5]
    with pytest.raises(ValueError, match="without frames"):
        column_stats(np.zeros((0, 3)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_merging_equals_the_whole(lengths: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    episodes = [generator.normal(generator.normal(1000), 0.01, (n, 2)) for n in lengths]
    merged = merge_stats({"x": column_stats(episode)} for episode in episodes)["x"]
    everything = np.concatenate(episodes)
    np.testing.assert_allclose(merged["mean"], everything.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(merged["std"], everything.std(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(merged["min"], everything.min(axis=0))
    assert merged["count"] == [len(everything)]
    # Outer bounds, as LeRobot has them.
    for name, bound in (("q01", np.min), ("q50", np.min), ("q90", np.max), ("q99", np.max)):
        each = [column_stats(episode)[name] for episode in episodes]
        np.testing.assert_array_equal(merged[name], bound(each, axis=0))


def test_images() -> None:
    images = np.random.default_rng(0).integers(3, 250, (6, 40, 50, 3), dtype=np.uint8)
    stats = image_stats([frame_histogram(image) for image in images])
    pixels = images.reshape(-1, 3) / 255
    assert stats["mean"].shape == (3, 1, 1)
    assert stats["count"] == [6]  # frames, not pixels
    np.testing.assert_allclose(stats["mean"].ravel(), pixels.mean(axis=0))
    np.testing.assert_allclose(stats["std"].ravel(), pixels.std(axis=0))
    np.testing.assert_allclose(stats["max"].ravel(), pixels.max(axis=0))
    for name, quantile in QUANTILES.items():
        values = images.reshape(-1, 3).astype(float)
        expected = [histogram_quantile(channel, quantile) / 255 for channel in values.T]
        np.testing.assert_allclose(stats[name].ravel(), expected, atol=1e-9)
    black = image_stats([frame_histogram(np.zeros((4, 4, 3), np.uint8))])
    assert all((black[name] == 0).all() for name in ("min", "max", "mean", "std", "q01", "q99"))


def test_large_images_are_thinned() -> None:
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    np.testing.assert_array_equal(frame_histogram(image), frame_histogram(image[::4, ::4]))
    assert frame_histogram(image[:299, :299]).sum() == 3 * 299 * 299


@given(st.integers(1, 10**7))
def test_sampled_frames(num_frames: int) -> None:
    sample = sampled_frames(num_frames)
    assert sample[0] == 0
    assert len(sample) <= 10_000
    assert sample[-1] == num_frames - 1
    assert (np.diff(sample) >= 1).all()
    if num_frames <= 100:
        assert len(sample) == num_frames
