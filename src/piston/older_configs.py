"""What earlier versions wrote into `config.json` and `run.json`, and what it is called now.

Whoever renames a class or removes a field adds a row, so that files of earlier versions are read:
to `TYPES` for the registered name of a class, and to `FIELDS` for a field, which is used where a
file has that field and its class has not. A field may be renamed:

    "may_be_new": Renamed("allow_missing"),

or removed. Files in which it changed nothing are read; others are refused with a sentence that says
what to do instead:

    "train.patience": Removed(None, "A run ends after num_train_steps now; stop it yourself."),

or be left out whatever it was, because it changed nothing that a run computes:

    "train.max_skipped_steps": left_out,

or be translated by a function of the fields and the old name, which returns the new fields, or
raises ValueError with such a sentence. Values are those of JSON. `train.patience` is the field of
the class registered as `train`; a name without a point belongs to any class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Fields = dict[str, Any]


def left_out(fields: Fields, old: str) -> Fields:
    """Return the fields without one that changed nothing that a run computes."""
    return {key: value for key, value in fields.items() if key != old}


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A field that has another name now."""

    new: str

    def __call__(self, fields: Fields, old: str) -> Fields:
        if self.new in fields:
            return fields
        return {self.new if key == old else key: value for key, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class Removed:
    """A field that is gone."""

    # With this value a run did what every run does now.
    without_effect: Any
    # Why another value is refused, and what to do.
    sentence: str

    def __call__(self, fields: Fields, old: str) -> Fields:
        if fields[old] != self.without_effect:
            raise ValueError(self.sentence)
        return left_out(fields, old)


FIELDS: Mapping[str, Callable[[Fields, str], Fields]] = {
    # Of 0.1.0.
    "may_be_new": Renamed("allow_missing"),
    "more_sets": Renamed("extra_datasets"),
    # Of 0.2.0.dev0.
    "train.max_skipped_steps": left_out,
}

TYPES = {
    # 0.1.0 wrote the module and the class.
    "piston.config:AssetsConfig": "assets",
    "piston.config:TrainConfig": "train",
    "piston.models.configs:Pi0Config": "pi0",
    "piston.models.configs:Pi0FASTConfig": "pi0_fast",
    "piston.models.variants:GemmaSize": "gemma_size",
    "piston.models.variants:LoRA": "lora",
    "piston.models.variants:VisionSize": "vision_size",
    "piston.optimization:AdamW": "adamw",
    "piston.optimization:CosineDecaySchedule": "cosine_decay",
    "piston.optimization:RsqrtDecaySchedule": "rsqrt_decay",
    "piston.robots.aloha:LeRobotAlohaDataConfig": "aloha",
    "piston.robots.droid:DroidDataConfig": "droid",
    "piston.robots.droid:LeRobotDROIDDataConfig": "lerobot_droid",
    "piston.robots.droid:RLDSDataset": "rlds_dataset",
    "piston.robots.droid:RLDSDroidDataConfig": "rlds_droid",
    "piston.robots.fake:FakeDataConfig": "fake",
    "piston.robots.libero:LeRobotLiberoDataConfig": "libero",
    "piston.robots.metaworld:LeRobotMetaworldDataConfig": "metaworld",
    "piston.robots.ur5:LeRobotUR5DataConfig": "ur5",
    "piston.transforms.base:Group": "group",
    "piston.transforms.keys:RepackTransform": "repack",
}


def translated(fields: Fields, kind: str, known: set[str], where: str) -> Fields:
    """Return the fields of a class of this registered name, where it knows only these.

    `where` is the file and the place in it, for messages.
    """
    for old in sorted(fields.keys() - known):
        change = FIELDS.get(f"{kind}.{old}") or FIELDS.get(old)
        if change is None:
            continue
        try:
            fields = change(fields, old)
        except ValueError as error:
            raise ValueError(f"{where}.{old} is {fields[old]!r}. {error}") from error
    return fields
