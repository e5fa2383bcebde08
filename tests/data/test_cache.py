"""The frame cache has the same pixels as decoding, and is built once."""

import multiprocessing
import os
import pickle
import shutil
import threading

import numpy as np
import pytest

from piston.data import cache as cache_module
from piston.data import check as check_module
from piston.data import open_dataset
from piston.data.cache import CachedFrames
from piston.data.video import VideoError
from piston.transforms.images import resize_with_pad

from .synthetic import Folder

TOP, WRIST = "observation.images.top", "observation.images.wrist"
PIXELS = 28


@pytest.fixture(params=["v2.1", "v3.0"])
def folder(request, tmp_path):
    return Folder(tmp_path / "set", request.param, cameras={TOP: "video", WRIST: "video"})


def open_cached(root, where, episodes=None, **options):
    dataset = open_dataset(root, episodes=episodes, sequences={"action": 4}, **options)
    return dataset, CachedFrames(dataset, PIXELS, where)


def assert_same(dataset, cached):
    assert len(dataset) == len(cached)
    for index in range(len(dataset)):
        expected, found = dataset[index], cached[index]
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            if key in dataset.cameras:
                value = resize_with_pad(value, PIXELS, PIXELS)
            np.testing.assert_array_equal(found[key], value, err_msg=f"{key} of {index}")


def forbid_decoding(monkeypatch):
    def fail(*_):
        raise AssertionError("a frame was decoded")

    monkeypatch.setattr("piston.data.video.VideoReader.frames_at", fail)


def test_items_are_the_same_and_nothing_is_decoded_any_more(folder, tmp_path, monkeypatch):
    dataset, cached = open_cached(folder.root, tmp_path / "cache")
    cached.build()
    assert_same(dataset, cached)
    expected = cached[20]
    forbid_decoding(monkeypatch)
    _, again = open_cached(folder.root, tmp_path / "cache")
    again.build()
    np.testing.assert_array_equal(again[20][TOP], expected[TOP])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(again))[20][TOP], expected[TOP])


def test_items_may_be_changed_without_changing_the_cache(folder, tmp_path):
    _, cached = open_cached(folder.root, tmp_path / "cache")
    cached.build()
    cached[3][TOP][:] = 0
    assert cached[3][TOP].any()


def test_subsets_share_one_cache_and_add_to_it(folder, tmp_path, monkeypatch):
    part, cached = open_cached(folder.root, tmp_path / "cache", episodes=[1])
    cached.build()
    assert_same(part, cached)
    decoded = []
    read = cache_module.resize_with_pad

    def count(*args):
        decoded.append(1)
        return read(*args)

    monkeypatch.setattr(cache_module, "resize_with_pad", count)
    whole, cached = open_cached(folder.root, tmp_path / "cache")
    cached.build()
    assert len(decoded) == 2 * (len(whole) - len(part))
    assert_same(whole, cached)


def test_image_features_are_cached_too(tmp_path):
    folder = Folder(tmp_path / "set", cameras={TOP: "image"})
    dataset, cached = open_cached(folder.root, tmp_path / "cache")
    cached.build()
    assert_same(dataset, cached)


def test_another_file_is_another_cache(folder, tmp_path):
    def place():
        return open_cached(folder.root, tmp_path / "cache")[1].folders[TOP]

    before = place()
    assert place() == before
    os.utime(folder.video_path(0), ns=(1, 1))
    assert place() != before


def test_what_was_built_before_a_failure_is_kept(tmp_path, monkeypatch):
    folder = Folder(tmp_path / "set")
    _, cached = open_cached(folder.root, tmp_path / "cache")
    frame, count = type(cached._dataset).frame, []

    def fail_late(self, *args):
        count.append(1)
        if len(count) > 14:  # episode 0 has 12 frames
            raise VideoError("episode 1, frame 2: damaged")
        return frame(self, *args)

    monkeypatch.setattr(check_module, "num_usable_cpus", lambda: 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(cached._dataset), "frame", fail_late)
        with pytest.raises(VideoError, match="episode 1, frame 2"):
            cached.build()
    dataset, again = open_cached(folder.root, tmp_path / "cache")
    missing = [episode.index for inside in again.missing() for _, episode, _ in inside]
    assert sorted(missing) == [1, 2]
    again.build()
    assert_same(dataset, again)


def test_too_small_a_disk_is_reported_before_anything_is_decoded(folder, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    forbid_decoding(monkeypatch)
    _, cached = open_cached(folder.root, tmp_path / "cache")
    with pytest.raises(OSError, match="needs 0.0 GB.*PISTON_HOME"):
        cached.build()


def _build(root, where, begin, results):
    dataset, cached = open_cached(root, where)
    decoded = []
    read = cache_module.resize_with_pad
    cache_module.resize_with_pad = lambda *args: (decoded.append(1), read(*args))[1]
    begin.wait()
    cached.build()
    right = all(
        np.array_equal(cached[i][TOP], resize_with_pad(dataset[i][TOP], PIXELS, PIXELS))
        for i in range(len(dataset))
    )
    results.put((len(decoded), right))


def test_several_processes_build_it_once(tmp_path):
    folder = Folder(tmp_path / "set")
    context = multiprocessing.get_context("fork")
    begin, results = context.Barrier(3), context.Queue()
    processes = [
        context.Process(target=_build, args=(folder.root, tmp_path / "cache", begin, results))
        for _ in range(3)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(count for count, _ in found) == [0, 0, sum(folder.lengths)]
    assert all(right for _, right in found)


def test_caches_of_two_sets_are_built_at_the_same_time(tmp_path, monkeypatch):
    roots = [Folder(tmp_path / name, "v3.0", cameras={TOP: "video"}).root for name in "ab"]
    first, second = (open_cached(root, tmp_path / "cache")[1] for root in roots)
    decode = CachedFrames._decode

    def decode_meanwhile(cached, *arguments):
        if cached is first:
            other = threading.Thread(target=second.build, daemon=True)
            other.start()
            other.join(30)
            assert not other.is_alive(), "the second set waits for the first"
        decode(cached, *arguments)

    monkeypatch.setattr(CachedFrames, "_decode", decode_meanwhile)
    first.build()
    assert not first.missing()
    assert not second.missing()


def test_it_is_under_piston_home(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    _, cached = open_cached(folder.root, None)
    assert cached.folders[TOP].is_relative_to(tmp_path / "home" / "frames" / "set")
