"""Presets of the DROID robot (a Franka arm with two cameras)."""

import dataclasses

from piston.config import AssetsConfig, CosineDecaySchedule, TrainConfig
from piston.models.configs import ModelConfig, Pi0Config, Pi0FASTConfig
from piston.robots.simple import (
    DroidDataConfig,
    LeRobotDROIDDataConfig,
    RLDSDataset,
    RLDSDroidDataConfig,
)

_CHECKPOINTS = "gs://openpi-assets/checkpoints"
_RANGES = "gs://openpi-assets/droid/{}_sample_ranges_v{}.json"
_DROID = DroidDataConfig(assets=AssetsConfig(asset_id="droid"), prompt_from_task=True)
_FLAT = CosineDecaySchedule(warmup_steps=1_000, peak_lr=5e-5, decay_steps=1_000_000, decay_lr=5e-5)


def _rlds(name: str, version: str, weight: float) -> RLDSDataset:
    ranges = _RANGES.format(name, version.replace(".", "_"))
    return RLDSDataset(name, version, weight, filter_dict_path=ranges)


_WITH_POLARIS = (
    _rlds("droid", "1.0.1", 0.9),
    _rlds("polaris_droid_cotrain_dataset", "1.0.0", 0.1),
)
_RLDS_DIR = "<path_to_droid_rlds_dataset>"


def _polaris(name: str, model: ModelConfig) -> TrainConfig:
    """Joint-position policies trained together with simulated demonstrations."""
    return TrainConfig(
        name=name,
        model=model,
        data=RLDSDroidDataConfig(
            assets=AssetsConfig(f"{_CHECKPOINTS}/polaris/{name}/assets", "droid"),
            rlds_data_dir=_RLDS_DIR,
            datasets=_WITH_POLARIS,
        ),
        weights=f"{_CHECKPOINTS}/polaris/{name}/params",
        lr_schedule=_FLAT,
        num_train_steps=1_000,
        batch_size=128,
        num_workers=0,
        keep_period=1_000,
    )


_FULL_DROID = RLDSDroidDataConfig(
    repo_id="droid", rlds_data_dir=_RLDS_DIR, datasets=(_rlds("droid", "1.0.1", 1.0),)
)
_FAST_ON_DROID = TrainConfig(
    name="pi0_fast_full_droid_finetune",
    model=Pi0FASTConfig(action_dim=8, action_horizon=16, max_token_len=180),
    data=_FULL_DROID,
    weights=f"{_CHECKPOINTS}/pi0_fast_base/params",
    lr_schedule=_FLAT,
    num_train_steps=100_000,
    batch_size=256,
    num_workers=0,
    save_interval=5_000,
    keep_period=20_000,
)

_OWN_DROID = LeRobotDROIDDataConfig(
    repo_id="your_hf_username/my_droid_dataset",
    assets=AssetsConfig(f"{_CHECKPOINTS}/pi05_droid/assets", "droid"),
    prompt_from_task=True,
)
_FINETUNE = TrainConfig(
    name="pi05_droid_finetune",
    model=Pi0Config(pi05=True, action_horizon=16),
    data=_OWN_DROID,
    weights=f"{_CHECKPOINTS}/pi05_droid/params",
    num_train_steps=20_000,
)

PRESETS = (
    # For inference.
    TrainConfig("pi0_droid", model=Pi0Config(action_horizon=10), data=_DROID),
    TrainConfig(
        "pi0_fast_droid", model=Pi0FASTConfig(action_dim=8, action_horizon=10), data=_DROID
    ),
    TrainConfig("pi05_droid", model=Pi0Config(pi05=True, action_horizon=15), data=_DROID),
    # For fine-tuning.
    _FAST_ON_DROID,
    dataclasses.replace(
        _FAST_ON_DROID,
        name="pi05_full_droid_finetune",
        model=Pi0Config(pi05=True, action_horizon=16),
        data=dataclasses.replace(
            _FULL_DROID,
            assets=AssetsConfig(f"{_CHECKPOINTS}/pi05_base/assets/", "droid"),
        ),
        weights=f"{_CHECKPOINTS}/pi05_base/params",
        keep_period=10_000,
    ),
    _FINETUNE,
    dataclasses.replace(
        _FINETUNE,
        name="pi05_ki_droid",
        model=Pi0Config(pi05=True, action_horizon=16, targets=("text", "fast"), insulate=True),
        data=dataclasses.replace(_OWN_DROID, subtasks=True),
    ),
    _polaris("pi05_droid_jointpos_polaris", Pi0Config(pi05=True, action_horizon=15)),
    _polaris(
        "pi0_fast_droid_jointpos_polaris",
        Pi0FASTConfig(action_dim=8, action_horizon=10, max_token_len=180),
    ),
    _polaris("pi0_droid_jointpos_polaris", Pi0Config(action_horizon=10, max_token_len=100)),
    _polaris("pi0_droid_jointpos_100k_polaris", Pi0Config(action_horizon=10, max_token_len=100)),
)
