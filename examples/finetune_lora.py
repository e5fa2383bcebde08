"""Fine-tune a base model with LoRA on an ALOHA data set: statistics, training, a first check.

    python examples/finetune_lora.py data/fold_towel
    python examples/finetune_lora.py you/your_set --base pi0_base --steps 5000 --rank 32

Only the adapters and the small layers around the action expert train. The weights of a full-size π0
take 13 GB as float32, and what trains adds little to it; activations come on top. The same run from
the command line is in docs/training.md; here you can change what no option reaches.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

import piston
from piston import weights
from piston.config import CosineDecaySchedule, DataConfig, TrainConfig
from piston.data.pipeline import open_source, split_sources
from piston.data.protocol import Dataset
from piston.data.statistics import TransformedColumns, compute_statistics
from piston.data.view import select
from piston.logs import init_logging
from piston.models.configs import GemmaSize, LoRA, Pi0Config
from piston.robots.aloha import LeRobotAlohaDataConfig, repack_aloha
from piston.training.loop import train_loop
from piston.transforms import compose
from piston.transforms.normalize import write_norm_stats

# The robot's cameras and their columns in the data set; `piston data info SET` lists the columns.
CAMERAS = {"cam_high": "observation.images.top"}


def main(
    dataset: Annotated[str, tyro.conf.Positional],
    base: str = "gs://openpi-assets/checkpoints/pi0_base",
    name: str = "lora",
    steps: int = 5_000,
    batch_size: int = 32,
    rank: int = 16,
    num_workers: int = 2,
) -> None:
    """Fine-tune a base model with LoRA.

    Args:
        dataset: A LeRobot data set of an ALOHA: a folder, or owner/name on the hub.
        base: The checkpoint to start from, in any format that Piston reads.
        name: The run's name.
        steps: Training steps.
        batch_size: Samples per step.
        rank: The rank of the adapters.
        num_workers: Processes that read data.
    """
    init_logging()
    config = make_config(dataset, base, name, steps, batch_size, rank, num_workers)
    write_statistics(config)
    checkpoint = train_loop(config)
    print(f"mean error on a frame that was held out: {error_on_a_frame(config, checkpoint):.3f}")
    print(f"piston serve {checkpoint}")
    print(f"piston convert {checkpoint} merged --merge-lora    # a model without adapters")


def make_config(
    dataset: str, base: str, name: str, steps: int, batch_size: int, rank: int, num_workers: int
) -> TrainConfig:
    def with_lora(size: GemmaSize) -> GemmaSize:
        return dataclasses.replace(size, lora=LoRA(rank=rank, alpha=float(rank)))

    model = weights.open_checkpoint(base).config
    if not isinstance(model, Pi0Config):
        raise ValueError(f"{base} is a {model.family} model; this program is for π0 and π0.5.")
    model = dataclasses.replace(
        model, vlm=with_lora(model.vlm), action_expert=with_lora(model.action_expert)
    )
    return TrainConfig(
        name="aloha_lora",
        exp_name=name,
        model=model,
        data=LeRobotAlohaDataConfig(
            repo_id=dataset, prompt_from_task=True, repack_transforms=repack_aloha(**CAMERAS)
        ),
        weights=base,
        # The base model has no adapters; they start as zero.
        allow_missing=("*lora*",),
        freeze=("vision.*", "vlm.*", "action_expert.*", "!*lora*"),
        lr_schedule=CosineDecaySchedule(
            warmup_steps=min(500, steps // 10), peak_lr=1e-4, decay_steps=steps, decay_lr=1e-5
        ),
        ema_decay=None,
        num_train_steps=steps,
        batch_size=batch_size,
        num_workers=num_workers,
        validation_episodes=1,
        validation_interval=max(1, steps // 5),
        save_interval=max(1, steps // 5),
        keep_last=5,
    )


def open_parts(config: TrainConfig) -> tuple[DataConfig, Dataset, Dataset]:
    """Return the pipeline, the episodes that the run trains on, and those that it holds out."""
    pipeline = config.data_config()
    dataset, held_out_count = open_source(pipeline, config.model), config.validation_episodes
    (parts,) = split_sources([pipeline], [dataset], held_out_count, seed=config.seed)
    trained, held_out = parts
    return pipeline, select(dataset, trained), select(dataset, held_out)


def write_statistics(config: TrainConfig) -> None:
    """Compute what `piston stats` computes, and write it where the run looks for it."""
    pipeline, trained, _ = open_parts(config)
    steps = pipeline.steps_read(config.model.action_horizon)
    found = compute_statistics([TransformedColumns(trained, pipeline, steps)])
    folder = Path(pipeline.assets_dir) / pipeline.asset_id
    write_norm_stats(folder, {key: one.norm_stats for key, one in found.items()})


def error_on_a_frame(config: TrainConfig, checkpoint: Path) -> float:
    """Return the mean distance of predicted and recorded actions, in the robot's own units."""
    pipeline, _, held_out = open_parts(config)
    item = held_out[len(held_out) // 2]
    frame = compose(pipeline.repack_transforms.inputs)({**item, "prompt": item["task"]})
    recorded, is_real = frame.pop("actions"), ~np.asarray(item["action_is_pad"])
    predicted = piston.load_policy(checkpoint).infer(frame, seed=0)["actions"]
    return float(np.abs(predicted - recorded)[is_real].mean())


if __name__ == "__main__":
    tyro.cli(main)
