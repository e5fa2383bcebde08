"""LeRobot v2.0 and v2.1 become v3.0.

Knows which parts of an episode are kept as they are, computed anew or encoded anew; reading and
writing are done by the readers and the store. Video is copied packet by packet, so its frames stay
exactly what they were, unless the file cannot be shared (an unusual codec, more frames than rows).

Statistics of columns are computed anew, with quantiles. Those of images are carried over where the
source has them for every episode, because computing them means decoding; then, as in the source,
they have no quantiles.
"""

import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from piston.data.check import inspect_files
from piston.data.episode_store import plain_fps
from piston.data.features import BOOKKEEPING, IMAGE_NAMES, Features
from piston.data.format import Episode, Metadata
from piston.data.recorder import choose_encoding
from piston.data.store_v30 import StoreV30, new_info_v30
from piston.data.v2_episodes import SourceEpisodes, carried_image_stats
from piston.data.video import VideoReader
from piston.data.video_encoding import VideoEncoding

logger = logging.getLogger(__name__)

# Called with the frames done so far and their total.
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What was written, and what was not."""

    target: Path
    num_episodes: int
    num_frames: int
    skipped: Mapping[str, str]  # episode or file -> why it is not there
    ignored: tuple[str, ...] = ()  # declared features without any data
    num_encoded: int = 0  # videos that had to be encoded anew
    num_retimed: int = 0  # episodes whose time stamps were not frame / fps, and are now


def convert_to_v30(
    source: str | Path,
    target: str | Path,
    progress: Progress | None = None,
    *,
    overwrite: bool = False,
    skip_broken: bool = False,
    recompute_image_stats: bool = False,
    codec: str | VideoEncoding | None = None,
    task: str | None = None,
    chunks_size: int = 1000,
    data_files_size_in_mb: float = 100,
    video_files_size_in_mb: float = 200,
) -> Conversion:
    """Writes the v2.x set `source` to `target` as v3.0; `target` appears only once it is complete.

    Episodes that cannot be read to the end are an error, or left out with `skip_broken`. `codec` is
    for videos that must be encoded anew, `task` for episodes that name none.
    """
    metadata = Metadata.read(source)
    if metadata.version == "v3.0":
        raise ValueError(f"{source} is v3.0 already: there is nothing to convert")
    findings = inspect_files(metadata, metadata.episodes)
    broken = {i: problem.what for i, problem in findings.left_out(metadata.cameras).items()}
    if broken and not skip_broken:
        raise ValueError(
            f"{source}: {len(broken)} episodes cannot be converted, the first: {_first(broken)}. "
            f"Run: piston data check {source}. To leave them out: --skip-broken (skip_broken=True)"
        )
    kept = [episode for episode in metadata.episodes if episode.index not in broken]
    if not kept:
        raise ValueError(f"{source}: no episode can be read, the first: {_first(broken)}")
    if task is not None and all(episode.tasks for episode in kept):
        raise ValueError(
            f"{source}: all episodes name their tasks, --task {task!r} would do nothing: do without"
        )
    features, ignored = _target_features(metadata, kept, findings.stored)
    sizes = {
        "chunks_size": chunks_size,
        "data_files_size_in_mb": data_files_size_in_mb,
        "video_files_size_in_mb": video_files_size_in_mb,
    }
    info = new_info_v30(plain_fps(metadata.fps), features, metadata.robot_type) | sizes
    with writing_target(target, overwrite, source=Path(source)) as folder:
        store = StoreV30(folder, info)
        store.start()
        store.add_tasks([text for _, text in sorted(metadata.tasks.items())])
        stats = {} if recompute_image_stats else carried_image_stats(metadata, features)
        reader = SourceEpisodes(metadata, features, folder, stats, choose_encoding(codec), task)
        total, done = sum(episode.length for episode in kept), 0
        for episode in kept:
            try:
                finished = reader.read(episode)
            except (ValueError, FileNotFoundError) as error:
                if not skip_broken:
                    error.add_note(
                        f"in episode {episode.index}; to leave such out: --skip-broken "
                        "(skip_broken=True)"
                    )
                    raise
                broken[episode.index] = str(error)
            else:
                store.add_episode(finished)
            done += episode.length
            if progress is not None:
                progress(done, total)
        if not store.num_episodes:
            raise ValueError(f"{source}: no episode can be read, the first: {_first(broken)}")
        store.close()
        written = {"num_episodes": store.num_episodes, "num_frames": store.num_frames}
    if reader.num_retimed:
        logger.warning(
            "%s: time stamps of %d episodes were not frame / fps: written so",
            *(source, reader.num_retimed),
        )
    return Conversion(
        target=Path(target),
        **written,
        skipped={f"episode {index}": what for index, what in sorted(broken.items())},
        ignored=ignored,
        num_encoded=reader.num_encoded,
        num_retimed=reader.num_retimed,
    )


@contextlib.contextmanager
def writing_target(
    target: str | Path, overwrite: bool, source: Path | None = None
) -> Iterator[Path]:
    """A folder beside `target` that takes its name at the end, or goes on an error."""
    target = Path(target)
    if source is not None and target.resolve() == source.resolve():
        raise ValueError(f"{target} is the source itself: choose another folder")
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} exists already: choose another folder, or replace it with --overwrite "
            "(overwrite=True)"
        )
    folder = target.with_name(f".{target.name}.converting")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _target_features(
    metadata: Metadata, kept: Sequence[Episode], stored: frozenset[str]
) -> tuple[Features, tuple[str, ...]]:
    """Features with data behind them, bookkeeping last; and the names of those without."""
    features: Features = {}
    ignored = []
    for key, entry in metadata.info["features"].items():
        is_video = entry["dtype"] == "video"
        if key in BOOKKEEPING:
            continue
        if key not in (metadata.cameras if is_video else stored):
            ignored.append(key)
            logger.warning(
                "%s: feature %r is declared but has no data: left out", metadata.root, key
            )
            continue
        features[key] = {
            "dtype": entry["dtype"],
            "shape": [int(size) for size in entry.get("shape") or [1]],
            "names": entry.get("names"),
        }
        if is_video:
            features[key] |= _actual_size(metadata, kept, key, features[key])
    return features | {key: dict(entry) for key, entry in BOOKKEEPING.items()}, tuple(ignored)


def _actual_size(
    metadata: Metadata, kept: Sequence[Episode], camera: str, entry: Mapping[str, Any]
) -> dict[str, Any]:
    """The size of the frames that are there, where the declaration says otherwise."""
    if metadata.features[camera].video.get("video.is_depth_map"):
        raise ValueError(f"{metadata.root}: {camera} is a depth video, which cannot be converted")
    spans = [e.videos[camera] for e in kept if camera in e.videos]
    with contextlib.closing(VideoReader(metadata.root / spans[0].path)) as reader:
        height, width = reader.size
    if sorted(entry["shape"]) == sorted([height, width, 3]):
        return {}
    found = [height, width, 3]
    logger.warning(
        "%s: %s is declared as %s, its frames are %s: written so",
        *(metadata.root, camera, entry["shape"], found),
    )
    return {"shape": found, "names": IMAGE_NAMES}


def _first(broken: Mapping[int, str]) -> str:
    index = min(broken)
    return f"episode {index} ({broken[index]})"
