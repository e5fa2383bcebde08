"""LeRobot data sets: read, checked, written, loaded in batches, summed up in statistics.

Files hand on in this order: `location` → `metadata` (what a folder says of itself) → `intact` (are
its files whole?) → `dataset` (samples, from `columns`, `images` and `video`) → `subsets` (parts and
mixtures). `check` reads all of it once and tells what is wrong.
"""

from piston.data.check import check_dataset
from piston.data.dataset import LeRobotDataset, open_dataset
from piston.data.metadata import Metadata, Problem

__all__ = ["LeRobotDataset", "Metadata", "Problem", "check_dataset", "open_dataset"]
