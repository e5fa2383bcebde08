"""The training loop, from a configuration to checkpoints that can be served.

Reads top to bottom: set up, data, model, steps, checkpoints. What each of them is stands in the
other files of this folder.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from piston import weights
from piston.config import DataConfig, TrainConfig
from piston.data.loader import Loader
from piston.data.order import Order
from piston.data.pipeline import open_source, open_training_data
from piston.data.subsets import Samples, split_episodes
from piston.models.autoregressive import Pi0FAST
from piston.models.flow import Pi0
from piston.training import distributed
from piston.training.checkpoint import CheckpointWriter, Statistics, restore
from piston.training.progress import Meter, RunBar, describe, save_first_batch
from piston.training.run import open_run
from piston.training.step import StepResult, Trainer
from piston.training.trackers import Tracker, make_trackers
from piston.training.validation import Validation

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """The run ended before its last step; the message says why and what to do."""


def train_loop(config: TrainConfig) -> Path:
    """Train as the configuration says; the folder of the last checkpoint."""
    # What is cheap and may be wrong comes first: nobody waits an hour for a missing file.
    pipeline = config.data_config().with_norm_stats(config.name)
    robot_dim = _robot_action_dim(pipeline)
    with ExitStack() as stack:
        processes = distributed.start(config.sharding)
        stack.callback(distributed.stop, processes)
        stop_asked = stack.enter_context(_signals())
        run, resumed = open_run(config, processes)

        training, held_out = _open_data(config, pipeline)
        order = Order(
            training,
            config.batch_size,
            seed=config.seed,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        loader = stack.enter_context(Loader(training, order, num_workers=config.num_workers))
        validation = held_out and Validation(held_out, processes, robot_dim)

        trainer = Trainer(config, _initial_model(config, processes), processes, robot_dim)
        first_step = 0
        if resumed is not None:
            progress = restore(trainer, run / str(resumed), processes)
            loader.load_state_dict(progress["loader"])
            first_step = resumed + 1
            logger.info("Resumed %s after step %d", run, resumed)

        writer = CheckpointWriter(config, run, processes, _statistics(pipeline))
        stack.callback(writer.wait)
        trackers = make_trackers(config, run) if processes.is_first else []
        for tracker in trackers:
            stack.callback(tracker.close)

        meter, skipped = Meter(config.batch_size), 0
        bar = stack.enter_context(RunBar(config, first_step, processes.is_first))
        last_step = config.num_train_steps - 1
        for step in range(first_step, config.num_train_steps):
            waiting = time.perf_counter()
            batch = next(loader)
            waited = time.perf_counter() - waiting
            if step == 0 and processes.is_first:
                save_first_batch(batch, run / "first_batch.png")

            result = trainer.step(batch, step)
            meter.add(result, waited)
            skipped = _count_skipped(skipped, result, batch, step, config)
            bar.advance(meter)

            if step % config.log_interval == 0 or step == last_step:
                _log(trackers, step, config, meter)
            if (
                validation
                and step
                and (step % config.validation_interval == 0 or step == last_step)
            ):
                _validate(validation, trainer, trackers, step)
            stopping = processes.agree(bool(stop_asked))
            if (step and step % config.save_interval == 0) or step == last_step or stopping:
                writer.save(trainer, step, {"loader": loader.state_dict()})
            if stopping and step < last_step:
                writer.finish()
                raise TrainingStopped(
                    f"Stopped by {stop_asked[0] if stop_asked else 'another process'} after step "
                    f"{step}, which is saved. Go on with --resume."
                )
        writer.finish()
    return run / str(last_step)


def _open_data(config: TrainConfig, pipeline: DataConfig) -> tuple[Samples, Samples | None]:
    """What is trained on, and the held-out episodes if there are to be any."""
    if config.validation_episodes == 0:
        return open_training_data(config, cache_frames=config.cache_frames), None
    if pipeline.fake:
        raise ValueError("--validation-episodes needs a data set; random samples have no episodes.")
    episodes = open_source(pipeline, config.model, images=False).episodes
    kept, held_out = split_episodes(episodes, config.validation_episodes, seed=config.seed)
    return (
        open_training_data(config, episodes=kept, cache_frames=config.cache_frames),
        open_training_data(config, episodes=held_out, cache_frames=config.cache_frames),
    )


def _initial_model(config: TrainConfig, processes: distributed.Processes) -> Pi0 | Pi0FAST:
    """Float32 masters, from a checkpoint or drawn with the run's seed."""
    torch.manual_seed(config.seed)
    if config.weights is None:
        return weights.build_model(config.model).to(processes.device)
    return weights.load_model(
        config.weights,
        config.model,
        dtype=torch.float32,
        device=processes.device,
        may_be_new=config.may_be_new,
    )


def _robot_action_dim(pipeline: DataConfig) -> int | None:
    stats = (pipeline.norm_stats or {}).get("actions")
    return None if stats is None else stats.dim


def _statistics(pipeline: DataConfig) -> Statistics | None:
    if pipeline.norm_stats is None or pipeline.asset_id is None:
        return None
    return Statistics(pipeline.asset_id, pipeline.norm_stats)


def _count_skipped(
    skipped: int, result: StepResult, batch: Mapping[str, Any], step: int, config: TrainConfig
) -> int:
    """How many steps in a row were not finite; too many end the run."""
    if not result.skipped:
        return 0
    frames = ", ".join(
        f"{int(episode)}/{int(frame)}"
        for episode, frame in zip(batch["episode_index"], batch["frame_index"])
    )
    logger.warning(
        "Step %d skipped: loss %s, gradient norm %s. Episodes/frames of the batch: %s",
        step,
        result.loss,
        result.gradient_norm,
        frames,
    )
    if skipped + 1 >= config.max_skipped_steps:
        raise TrainingStopped(
            f"{skipped + 1} steps in a row had a loss or gradient that is not finite; the last "
            "checkpoint is untouched. Lower --lr-schedule.peak-lr, look at the episodes above with "
            "`piston data check`, or try --model.dtype float32."
        )
    return skipped + 1


def _log(trackers: list[Tracker], step: int, config: TrainConfig, meter: Meter) -> None:
    numbers = meter.numbers()
    meter.reset()
    for tracker in trackers:
        tracker.log(step, numbers)
    if trackers:
        logger.info("step %d/%d  %s", step, config.num_train_steps, describe(numbers))


def _validate(validation: Validation, trainer: Trainer, trackers: list[Tracker], step: int) -> None:
    """With the weights that would be served."""
    trainer.model.eval()
    if trainer.ema is None:
        numbers = validation.run(trainer.model)
    else:
        with trainer.ema.applied():
            numbers = validation.run(trainer.model)
    trainer.model.train()
    for tracker in trackers:
        tracker.log(step, numbers)
    if trackers:
        told = (
            f"{name} {value:.4f}" for name, value in numbers.items() if isinstance(value, float)
        )
        logger.info("step %d  %s", step, "  ".join(told))


@contextmanager
def _signals() -> Iterator[list[str]]:
    """SIGTERM and Ctrl-C ask the loop to finish its step and save; a second Ctrl-C ends at once."""
    asked: list[str] = []

    def ask(number: int, _: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)
        logger.info("%s: finishing the step, then saving.", asked[-1])

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
