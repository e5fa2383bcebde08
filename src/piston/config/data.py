"""`DataConfig`, the description of a data pipeline, and the factories that make one.

A `DataConfigFactory` describes a robot's data set; it becomes a `DataConfig` once the model is
known. A `MixtureDataConfig` has several of them by name, for one model of several robots. Nothing
here reads data; `DataConfig.with_norm_stats` reads the statistics.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import tyro

from piston import assets as asset_files
from piston.models.configs import ModelConfig, Pi0Config
from piston.serialization import register
from piston.suggestions import did_you_mean
from piston.tokenizers.fast import FASTPrompt, FASTTokenizer
from piston.tokenizers.text import BytesTokenizer, PaligemmaTokenizer
from piston.transforms import Group, Transform, for_inference
from piston.transforms.actions import PadStatesAndActions
from piston.transforms.images import FillCameras, ResizeImages
from piston.transforms.normalize import Normalize, NormStats, Unnormalize, read_norm_stats
from piston.transforms.prompts import (
    ExtractFASTActions,
    InjectDefaultPrompt,
    ResponseTokens,
    TokenizeFASTInputs,
    TokenizePrompt,
)


@register("assets")
@dataclasses.dataclass(frozen=True)
class AssetsConfig:
    """Where normalisation statistics are: `<assets_dir>/<asset_id>/norm_stats.json`.

    A run uses the statistics of a base model if these are its assets, for example
    `gs://…/pi0_base/assets` and `trossen`.
    """

    # A folder or a location; None: the preset's own folder under `assets_base_dir`.
    assets_dir: str | None = None
    # The folder's name in it, usually the robot's; None: the data set's repo_id.
    asset_id: str | None = None


@dataclasses.dataclass(frozen=True)
class _DataOptions:
    """What a pipeline takes over from the factory that made it."""

    # The data set: a folder, or owner/name on the hub.
    repo_id: str | None = None
    # Which of its episodes: 0:50 or 3,7,9-12, without some: !7; None: all.
    episodes: str | None = None
    # Further data sets of the same robot to train on as well; of some episodes: folder#0:50
    extra_datasets: tuple[str, ...] = ()
    # How often each set is drawn, the first one first, e.g. 2 1; by default by its frames.
    set_shares: tuple[float, ...] = ()
    # Share of the samples drawn from this robot's sets, in a mixture of robots; in any unit. None
    # for all robots: by their frames.
    share: float | None = None
    # The prompt is the text of the frame's task in the data set.
    prompt_from_task: bool = False
    # The policy writes the subtask that it is in before its actions, as the data set's labels say.
    subtasks: bool = False
    # A smaller normalisation range is replaced by this, for dimensions that hardly move.
    norm_floor: float = 0.0


@dataclasses.dataclass(frozen=True)
class DataConfig(_DataOptions):
    """A pipeline: from a data set or a robot to the model's inputs, and back to the robot.

    `repo_id` is None if there is no data set, as when a policy is only served.
    """

    # The robot's name in a mixture of several; empty if there is only one.
    entry: str = ""
    # Position of this pipeline's set among several.
    set_index: int = 0
    # How often this set is drawn among those of the same robot; None: by its frames.
    set_share: float | None = None
    # Whether it is one of the robot's further sets.
    is_extra: bool = False
    # Whether there are states and actions; otherwise only pictures with questions and answers.
    has_actions: bool = True
    # The camera slot that shows the picture of a question; None: the policy answers none.
    question_slot: str | None = None
    assets_dir: str | None = None
    asset_id: str | None = None
    norm_stats: Mapping[str, NormStats] | None = None
    # The data set's keys → the robot's own keys. Not used at inference.
    repack_transforms: Group = Group()
    # The robot's own keys ↔ state, actions and cameras. Statistics are computed after these.
    data_transforms: Group = Group()
    # What the model needs: prompt tokens, image size, padding.
    model_transforms: Group = Group()
    use_quantile_norm: bool = False
    # Keys read as sequences of `steps_read(horizon)` steps.
    action_sequence_keys: tuple[str, ...] = ("actions",)
    # Control steps between one action of the model's chunk and the next.
    action_stride: int = 1
    # Random samples in the model's shapes instead of a data set.
    fake: bool = False
    # Why the data set that is named cannot be read, if so.
    not_readable: str | None = None
    # What clients are told of the robot: the observation that it sends, names, its rate.
    robot_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        flag = self.flag
        if self.norm_floor < 0:
            raise ValueError(f"{flag('norm-floor')} is {self.norm_floor}; expected at least 0.")
        if self.set_shares and len(self.set_shares) != 1 + len(self.extra_datasets):
            raise ValueError(
                f"{flag('set-shares')} has {len(self.set_shares)} of "
                f"{1 + len(self.extra_datasets)} numbers: the first for {flag('repo-id')}, then "
                f"one for each of {flag('extra-datasets')}."
            )
        if not all(0 < share < math.inf for share in self.set_shares):
            raise ValueError(f"{flag('set-shares')} is {self.set_shares}; each must be above 0.")
        if self.asset_id is not None:
            path = Path(self.asset_id)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(
                    f"{flag('assets.asset-id')} is {self.asset_id!r}; it names a folder inside "
                    "every checkpoint and must not lead out of it. Set "
                    f"{flag('assets.assets-dir')} to its parent folder."
                )

    @property
    def title(self) -> str:
        """Return the data set's name for a message, in a mixture with that of the robot."""
        return f"{self.repo_id} ({self.entry})" if self.entry else str(self.repo_id)

    def flag(self, option: str) -> str:
        """Return how an option of this robot's data is written on the command line."""
        return f"--data.{self.entry}.{option}" if self.entry else f"--data.{option}"

    def with_norm_stats(self, preset: str = "PRESET") -> DataConfig:
        """Return a copy with statistics. Raise FileNotFoundError if there are none.

        `preset` is for the message: the arguments that `piston stats` needs to compute them.
        """
        if self.norm_stats is not None or self.fake or not self.has_actions:
            return self
        if self.asset_id is None or self.assets_dir is None:
            raise ValueError(
                f"No normalisation statistics are named: set {self.flag('assets.asset-id')}, and "
                f"{self.flag('assets.assets-dir')} unless they are in the preset's own folder."
            )
        location = f"{self.assets_dir.rstrip('/')}/{self.asset_id}"
        if "://" not in location and not Path(location).is_dir():
            root = Path(self.assets_dir)
            files = sorted(root.rglob("norm_stats.json"))
            found = [path.parent.relative_to(root).as_posix() for path in files]
            listed = f" Found there: {', '.join(found)}." if found else ""
            raise FileNotFoundError(
                f"norm_stats.json missing in {location} ({self.flag('assets.asset-id')} "
                f"{self.asset_id})."
                f"{did_you_mean(self.asset_id, found) or listed} Run: piston stats {preset}"
            )
        stats = read_norm_stats(asset_files.resolve(location))
        return dataclasses.replace(self, norm_stats=stats)

    def each_set(self) -> tuple[DataConfig, ...]:
        """Return a pipeline for each data set, with the same transforms and statistics."""
        shares = self.set_shares or [None] * (1 + len(self.extra_datasets))
        first = dataclasses.replace(self, extra_datasets=(), set_shares=(), set_share=shares[0])
        sets = [first]
        for index, (text, share) in enumerate(zip(self.extra_datasets, shares[1:]), start=1):
            # Text after "#" that does not choose episodes belongs to the name.
            match = re.fullmatch(r"(.*)#([\d\s:,!-]+)", text)
            name, episodes = match.groups() if match else (text, None)
            if not name:
                flag = self.flag("extra-datasets")
                raise ValueError(f"{flag} holds {text!r}, which names no data set.")
            other = dataclasses.replace(first, repo_id=name, episodes=episodes, set_share=share)
            place = self.set_index + index
            sets.append(dataclasses.replace(other, set_index=place, is_extra=True))
        return tuple(sets)

    def steps_read(self, horizon: int) -> int:
        """Return the number of the data set's steps that a chunk of the model spans."""
        return (horizon - 1) * self.action_stride + 1

    def input_transforms(self, *, training: bool) -> tuple[Transform, ...]:
        """Return the transforms from a data set's item, or a robot's observation, to the model."""
        return tuple(itertools.chain(*self.input_stages(training=training).values()))

    def input_stages(self, *, training: bool) -> dict[str, tuple[Transform, ...]]:
        """Return the input transforms in order, by what they are for.

        At inference there is no repack, and transforms that belong to training are left out.
        """
        stages = {
            "repack": tuple(self.repack_transforms.inputs),
            "data transforms": tuple(self.data_transforms.inputs),
            "normalisation": self._normalization(Normalize),
            "model transforms": tuple(self.model_transforms.inputs),
        }
        if training:
            return stages
        return {name: for_inference(s) for name, s in stages.items() if name != "repack"}

    def output_transforms(self) -> tuple[Transform, ...]:
        """Return the transforms from the model's actions to the robot's."""
        return (
            *self.model_transforms.outputs,
            *self._normalization(Unnormalize),
            *self.data_transforms.outputs,
        )

    def _normalization(self, kind: type[Normalize] | type[Unnormalize]) -> tuple[Transform, ...]:
        if self.fake or not self.has_actions:
            return ()
        if self.norm_stats is None:
            raise ValueError(
                f"The pipeline of {self.repo_id or self.asset_id!r} has no normalisation "
                "statistics yet: call with_norm_stats() first."
            )
        return (kind(self.norm_stats, self.use_quantile_norm, floor=self.norm_floor),)


class DataSource(abc.ABC):
    """What a run trains on: the data of one robot, or a mixture of several."""

    @property
    @abc.abstractmethod
    def entries(self) -> Mapping[str, DataConfigFactory]:
        """Return the robots by their names; the name of a single one is empty."""

    @property
    @abc.abstractmethod
    def robot(self) -> str:
        """Return the robot's name, or the names of several."""

    @abc.abstractmethod
    def with_assets(self, assets_dir: str) -> DataSource:
        """Return the same with statistics of this folder, under the names that they have."""


@dataclasses.dataclass(frozen=True)
class DataConfigFactory(_DataOptions, DataSource):
    """A robot's data set and how to read it. `piston.robots` has one for each robot."""

    # The data set: a folder, or owner/name on the hub.
    repo_id: str = tyro.MISSING
    # Whether it is a robot; otherwise it has only pictures with questions and answers.
    has_actions: ClassVar[bool] = True

    # Where its statistics are.
    assets: AssetsConfig = AssetsConfig()
    # The prompt of a sample that brings none.
    default_prompt: str | None = None

    @property
    def entries(self) -> Mapping[str, DataConfigFactory]:
        return {"": self}

    @property
    def asset_id(self) -> str | None:
        """The name of the folder with its statistics; None if it has no data set."""
        if self.assets.asset_id is not None or self.repo_id is tyro.MISSING:
            return self.assets.asset_id
        # `owner/name` as it is, and the name of a folder that is elsewhere
        path = Path(self.repo_id)
        elsewhere = path.is_absolute() or ".." in path.parts
        return path.resolve().name if elsewhere else path.as_posix()

    def with_assets(self, assets_dir: str) -> Self:
        return dataclasses.replace(self, assets=AssetsConfig(assets_dir, self.asset_id))

    @abc.abstractmethod
    def create(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        """Return the pipeline for this model. Reads no files."""

    def create_base_config(self, assets_dirs: Path, model_config: ModelConfig) -> DataConfig:
        """Return what is common to all robots' pipelines; a robot adds its transforms."""
        repo_id = None if self.repo_id is tyro.MISSING else self.repo_id
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(_DataOptions)}
        return DataConfig(
            **{**options, "repo_id": repo_id},
            assets_dir=self.assets.assets_dir or str(assets_dirs),
            asset_id=self.asset_id,
            model_transforms=ModelTransformFactory(self.default_prompt, self.subtasks)(
                model_config
            ),
            use_quantile_norm=model_config.uses_quantiles,
        )


@register("mixture")
@dataclasses.dataclass(frozen=True)
class MixtureDataConfig(DataSource):
    """Several robots, or pictures with questions, by name: one model learns from all of them.

    Each has its own data sets, transforms, statistics, control rate and prompt. The name is what
    `piston serve --robot` and a request's `robot` call it.
    """

    # The robots by name.
    robots: Annotated[Mapping[str, DataConfigFactory], tyro.conf.arg(name="")]

    def __post_init__(self) -> None:
        if not any(one.has_actions for one in self.robots.values()):
            raise ValueError(
                "A mixture needs at least one robot: pictures with questions train no actions."
            )
        shares = {name: one.share for name, one in self.robots.items()}
        for name, share in shares.items():
            if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
                raise ValueError(
                    f"{name!r} cannot be the name of a robot in a mixture: expected small letters, "
                    "digits, _ and -, and a letter first."
                )
            if share is not None and not 0 < share < math.inf:
                raise ValueError(f"--data.{name}.share is {share}; expected a number above 0.")
            if (share is None) != (None in {*shares.values()}):
                without = ", ".join(other for other, one in shares.items() if one is None)
                raise ValueError(
                    f"--data.{name}.share is {share}, but {without} has no share. Give every robot "
                    "of the mixture a share, or none: then they are drawn by their frames."
                )

    @property
    def entries(self) -> Mapping[str, DataConfigFactory]:
        return self.robots

    @property
    def robot(self) -> str:
        return ", ".join(self.robots)

    def with_assets(self, assets_dir: str) -> MixtureDataConfig:
        robots = {name: one.with_assets(assets_dir) for name, one in self.robots.items()}
        return dataclasses.replace(self, robots=robots)


@dataclasses.dataclass(frozen=True)
class ModelTransformFactory:
    """The transforms that a model needs, for any robot."""

    default_prompt: str | None = None
    # Whether the policy writes the subtask that it is in.
    subtasks: bool = False

    def __call__(self, model_config: ModelConfig) -> Group:
        pixels, max_len = model_config.image_size, model_config.prompt_length
        text = BytesTokenizer() if model_config.tokenizer == "bytes" else PaligemmaTokenizer()
        prepare: tuple[Transform, ...] = (
            InjectDefaultPrompt(self.default_prompt),
            ResizeImages(pixels, pixels),
            FillCameras(model_config.cameras, model_config.masks_absent_cameras, pixels, pixels),
        )
        if self.subtasks and "text" not in model_config.targets:
            raise ValueError(
                "--data.subtasks asks for a policy that writes its subtask, which needs a model "
                "with text among its --model.targets."
            )
        flow = model_config if isinstance(model_config, Pi0Config) else None
        fast = None
        if model_config.action_tokenizer is not None:
            codes = FASTTokenizer(model_config.action_tokenizer)
            max_fast_len = max_len if flow is None else flow.max_fast_len
            fast = FASTPrompt(text, codes, model_config.vocab_size, max_fast_len)
        if not model_config.denoises:
            assert fast is not None
            chunk = (model_config.action_horizon, model_config.action_dim)
            return Group((*prepare, TokenizeFASTInputs(fast)), (ExtractFASTActions(fast, *chunk),))
        response = None
        if flow is not None and flow.targets:
            max_text_len = flow.max_text_len if "text" in flow.targets else 0
            response = ResponseTokens(max_text_len, self.subtasks, fast)
        # The state is written into the prompt before it is padded.
        tokenize = TokenizePrompt(text, max_len, model_config.state_in_prompt, response)
        return Group((*prepare, tokenize, PadStatesAndActions(model_config.action_dim)))
