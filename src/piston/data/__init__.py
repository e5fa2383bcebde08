"""Datasets: reading, checking, writing, loading in batches, statistics.

`protocol` says what a dataset is, `open` has a row for each format, `view` selects and makes chunks.
`format` and `metadata` read what a folder declares, `columns` and `video` read its files,
`findings` and `check` find what is wrong (`problems`), `dataset` is the open data set, and
`pipeline` makes it what the model sees. `recorder`, `convert` and `aloha_hdf5` make new sets, which
`writer` stores episode by episode.
"""

from piston.data.check import check_dataset
from piston.data.dataset import LeRobotDataset, open_dataset
from piston.data.metadata import Metadata
from piston.data.problems import Problem

__all__ = ["LeRobotDataset", "Metadata", "Problem", "check_dataset", "open_dataset"]
