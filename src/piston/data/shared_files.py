"""Which staged episodes share a file, and joining them there.

Knows sizes, slots and what can be joined. Knows nothing of metadata.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from piston.data.parquet_tables import concatenate_parquet
from piston.data.video_remux import join_key, join_videos
from piston.files import link_or_copy

# Sorts after every shared file, so that readers that take all data files in order of name see the
# right order.
STAGING_CHUNK = 999


@dataclasses.dataclass(frozen=True, order=True)
class Slot:
    """Which file: its chunk (folder) and its number there."""

    chunk: int
    file: int

    def next(self, chunks_size: int) -> "Slot":
        full = self.file + 1 >= chunks_size
        following = Slot(self.chunk + 1, 0) if full else Slot(self.chunk, self.file + 1)
        if following.chunk >= STAGING_CHUNK:
            raise ValueError(
                f"more than {STAGING_CHUNK} chunks of {chunks_size} files: raise chunks_size or "
                "the file sizes"
            )
        return following


@dataclasses.dataclass(frozen=True)
class Staged:
    """One episode in a file of its own; `row` is its row in the newest file of meta/episodes."""

    row: int
    path: Path
    num_frames: int
    num_bytes: int


def group_staged(staged: Sequence[Staged], limit: float) -> list[list[Staged]]:
    """Neighbours that fit into one file, and whose videos can share one."""
    groups: list[list[Staged]] = []
    for episode in staged:
        if groups:
            size = sum(member.num_bytes for member in groups[-1]) + episode.num_bytes
            if size <= limit and _joinable(episode.path, groups[-1][0].path):
                groups[-1].append(episode)
                continue
        groups.append([episode])
    return groups


def join(group: Sequence[Staged], target: Path, fps: float) -> None:
    """Makes one file of the group; the staged files stay."""
    sources = [(episode.path, episode.num_frames) for episode in group]
    if len(sources) == 1:
        link_or_copy(sources[0][0], target)
    elif target.suffix == ".mp4":
        join_videos(sources, target, fps)
    else:
        concatenate_parquet([path for path, _ in sources], target)


def _joinable(path: Path, first: Path) -> bool:
    return path.suffix != ".mp4" or join_key(path) == join_key(first)
