"""The training loop, from a configuration to checkpoints that can be served."""

from __future__ import annotations

import dataclasses
import functools
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from piston import weights
from piston.config import ROBOTS, DataConfig, TrainConfig
from piston.data.limits import action_limits
from piston.data.loader import Batch, Loader, Order
from piston.data.mixture import RepeatedStarts, WeightedMixture, joined, mixed
from piston.data.pipeline import (
    action_names,
    open_sources,
    open_training_data,
    require_short_texts,
    split_sources,
)
from piston.data.problems import EpisodeError, leave_out_any
from piston.data.protocol import Dataset, Samples
from piston.data.statistics import require_finite
from piston.models.model import Model
from piston.progress import ProgressBar
from piston.signals import StopSignals
from piston.training import trackers
from piston.training.checkpoint import CheckpointWriter, restore, warn_of_other_statistics
from piston.training.distributed import Processes, join_processes
from piston.training.optimizer import freeze_parameters
from piston.training.run import Run, begin, check_weights, open_run, read_statistics
from piston.training.step import Trainer
from piston.training.trackers import Meter, Metrics, Trackers, TrainingStopped
from piston.training.validation import validate
from piston_client.limits import Limits

logger = logging.getLogger(__name__)

Measure = Callable[[Trainer], Metrics]


def train_loop(config: TrainConfig) -> Path:
    """Train as configured and return the folder of the last checkpoint."""
    # Cheap checks come first, so that nobody waits an hour for a missing file.
    trackers.require_installed(config)
    pipelines = read_statistics(config)
    for one in pipelines:
        if config.mask_padded_dims and one.has_actions and "actions" not in (one.norm_stats or {}):
            raise ValueError(
                f"--mask-padded-dims needs statistics of the actions of {one.title}: they tell the "
                "robot's dimensions."
            )
    freeze_parameters(weights.build_on_meta(config.model), config.freeze)
    with ExitStack() as stack:
        processes = stack.enter_context(join_processes(config))
        run = stack.enter_context(open_run(config, processes))
        if processes.is_first:
            trackers.check_logins(config)
        if run.resumed is None:
            check_weights(config)
        is_fake = any(one.fake for one in pipelines)
        sources = [] if is_fake else open_sources(pipelines, config.model)
        training, held_out = _open_data(config, pipelines, sources)
        # Only the first process writes configurations.
        saved = _with_limits(config, pipelines, sources) if processes.is_first else config
        rank, size = processes.rank, processes.world_size
        order = Order(training, config.batch_size, seed=config.seed, rank=rank, world_size=size)
        loader = stack.enter_context(Loader(training, order, num_workers=config.num_workers))
        trainer = Trainer(config, _initial_model(config, processes, run), processes)
        meter = Meter(config, trainer)
        if run.resumed_folder is not None:
            progress = restore(trainer, run.resumed_folder)
            loader.load_state_dict(progress["loader"])
            meter.restore(progress["meter"])
            logger.info("Resumed %s after step %d", run.folder, run.resumed)
            if processes.is_first:
                for one in pipelines:
                    warn_of_other_statistics(run.resumed_folder, one)
        # From here on files are written.
        begin(run, config, processes)
        writer = stack.enter_context(CheckpointWriter(saved, run.folder, processes, pipelines))
        measure: Measure | None = None
        if held_out is not None:
            names = _dimension_names(config, pipelines, sources)
            measure = functools.partial(validate, samples=held_out, names=names)
        _run_steps(run, loader, trainer, meter, writer, measure)
    return run.folder / str(max(config.num_train_steps - 1, run.resumed or 0))


def _run_steps(
    run: Run,
    loader: Loader,
    trainer: Trainer,
    meter: Meter,
    writer: CheckpointWriter,
    measure: Measure | None,
) -> None:
    """Train; `measure` validates."""
    config, processes = trainer.config, trainer.processes
    last_step = config.num_train_steps - 1
    with ExitStack() as stack:
        tracking, show = Trackers({}), None
        if processes.is_first:
            tracking = trackers.make_trackers(config, run.folder, run.first_step)
            stack.callback(tracking.close)
            show = stack.enter_context(_progress_bar(config, run)).show
        signals = stack.enter_context(StopSignals("finishing the step, then saving."))
        meter.start_clock()
        for step in range(run.first_step, config.num_train_steps):
            before, begun = loader.state_dict(), time.perf_counter()
            batch, failure = _read(loader)
            waited = time.perf_counter() - begun
            weights = {} if failure is not None else trainer.loss_weights(batch)
            totals = trainer.totals(weights)
            # Everything that the processes have to agree on in a step, in one small all-reduce.
            failed, stopping, *sums = processes.sum(
                failure is not None,
                signals.received is not None and step > run.first_step,
                *totals.values(),
            )
            if failed or stopping:
                meter.read()
                if step > run.first_step and not _is_due(step - 1, config.save_interval):
                    progress = {"loader": before, "meter": dict(meter.totals)}
                    writer.save(trainer, step - 1, progress, last=True)
                writer.finish()
                raise _no_data(failure, step, config) if failed else _stopped(signals, step - 1)
            if step == 0 and processes.is_first:
                trackers.save_first_batch(batch, run.folder / "first_batch.png")
            meter.add(
                step, trainer.step(batch, step, weights, dict(zip(totals, sums))), batch, waited
            )
            is_last = step == last_step
            is_logged = step % config.log_interval == 0 or is_last
            is_saved = _is_due(step, config.save_interval) or is_last
            if is_logged or is_saved:
                meter.read()
            if show is not None:
                show(step + 1, note=str(meter))
            if is_logged:
                tracking.log(step, meter.metrics())
                if processes.is_first:
                    left = meter.time_left(last_step - step)
                    logger.info("step %d/%d  %s  %s left", step, last_step + 1, meter, left)
                meter.begin_interval()
            with meter.paused():
                if measure is not None and (_is_due(step, config.validation_interval) or is_last):
                    metrics = measure(trainer)
                    tracking.log(step, metrics)
                    if processes.is_first:
                        shown = [f"{k} {v:.4f}" for k, v in metrics.items() if type(v) is float]
                        logger.info("step %d  %s", step, "  ".join(shown))
                if is_saved:
                    progress = {"loader": loader.state_dict(), "meter": dict(meter.totals)}
                    writer.save(trainer, step, progress, last=is_last)
        writer.finish()


def _progress_bar(config: TrainConfig, run: Run) -> ProgressBar:
    # Without log lines of its own: the loop logs one per interval.
    shown = {"done": run.first_step, "after": 0, "note_width": 55}
    return ProgressBar(config.exp_name, "steps", config.num_train_steps, **shown, logs=False)


def _open_data(
    config: TrainConfig, pipelines: Sequence[DataConfig], sources: Sequence[Dataset]
) -> tuple[Samples, Samples | None]:
    """Return the training data and, if asked for, the held-out episodes of the open data sets."""
    if any(one.fake for one in pipelines):
        if config.validation_episodes or config.start_frames or len(pipelines) > 1:
            raise ValueError(
                "--validation-episodes, --start-frames and --data.extra-datasets need a data set; "
                "random samples have no episodes."
            )
        return open_training_data(pipelines[0], config.model), None
    for one, source in zip(pipelines, sources):
        if one.has_actions:
            require_finite(source, one, one.steps_read(config.model.action_horizon))
        require_short_texts(source, one)
    parts = split_sources(pipelines, sources, config.validation_episodes, seed=config.seed)
    training: list[Samples] = []
    held_out: list[Samples] = []
    for one, source, (kept, chosen) in zip(pipelines, sources, parts):
        read = functools.partial(
            open_training_data, one, config.model, source=source, cache_frames=config.cache_frames
        )
        samples = read(episodes=kept)
        if config.start_frames and one.has_actions:
            lengths = [episode.length for episode in source.episodes if episode.index in kept]
            samples = RepeatedStarts(samples, lengths, config.start_frames, config.start_weight)
        training.append(samples)
        if chosen:
            held_out.append(read(episodes=chosen))
    everything = mixed(training, pipelines)
    shares = everything.weights if isinstance(everything, WeightedMixture) else ()
    for one, samples, share, (kept, chosen) in zip(pipelines, training, shares, parts):
        logger.info(
            "Set %d: %s%s, %d episodes, %d samples, %.1f %% of the samples drawn%s",
            *(one.set_index, f"{one.entry}, " * bool(one.entry), one.repo_id, len(kept)),
            *(len(samples), 100 * share),
            f"; {len(chosen)} episodes held out" if chosen else "",
        )
    return everything, joined(held_out) if held_out else None


def _dimension_names(
    config: TrainConfig, pipelines: Sequence[DataConfig], sources: Sequence[Dataset]
) -> tuple[str, ...]:
    """Return names of the action dimensions: of the robot, or numbers if there are several."""
    robots = [(one, source) for one, source in zip(pipelines, sources) if one.has_actions]
    dims = [stats.dim for one, _ in robots if (stats := (one.norm_stats or {}).get("actions"))]
    dim = max(dims, default=config.model.action_dim)
    if len({one.entry for one, _ in robots}) > 1:
        return tuple(map(str, range(dim)))
    return action_names(robots[0][1], robots[0][0], dim)


def _with_limits(
    config: TrainConfig, pipelines: Sequence[DataConfig], sources: Sequence[Dataset]
) -> TrainConfig:
    """Return the configuration for checkpoints: its metadata hold what the data say of the actions.

    These are their limits and how many there are per second, unless the preset or robot says so.
    Of a mixture they are stored by robot.
    """
    robots: dict[str, dict[str, Any]] = {}
    stored = dict(config.policy_metadata or {})
    for entry in dict.fromkeys(one.entry for one in pipelines if one.has_actions and sources):
        own = [(one, s) for one, s in zip(pipelines, sources) if one.entry == entry]
        metadata = dict(stored.get(ROBOTS, {}).get(entry, {}) if entry else stored)
        robots[entry] = _limits_of_robot(metadata, config, *zip(*own))
    if not robots:
        return config
    metadata = robots.get("") or {**stored, ROBOTS: robots}
    return dataclasses.replace(config, policy_metadata=metadata)


def _limits_of_robot(
    metadata: dict[str, Any],
    config: TrainConfig,
    pipelines: Sequence[DataConfig],
    sources: Sequence[Dataset],
) -> dict[str, Any]:
    if "control_hz" not in pipelines[0].robot_metadata:
        metadata.setdefault("control_hz", float(sources[0].fps))
    limits = action_limits(sources, pipelines)
    stated = Limits.of_metadata(metadata)
    if stated is not None and stated.dim not in (None, limits.dim):
        raise ValueError(
            f"action_limits in the policy_metadata of {config.name!r} are for {stated.dim} "
            f"dimensions; the robot's actions have {limits.dim}."
        )
    metadata.setdefault("action_limits", limits.as_metadata())
    return metadata


def _initial_model(config: TrainConfig, processes: Processes, run: Run) -> Model:
    """Return float32 master weights: loaded, random, or empty if the run is resumed."""
    # FSDP moves a model to its device in parts; the whole may not fit there.
    device = torch.device("cpu") if config.sharding == "fsdp" else processes.device
    torch.manual_seed(config.seed)
    if run.resumed is not None:
        return weights.build_on_meta(config.model).to_empty(device=device)
    if config.weights is None:
        return weights.build_model(config.model).to(device)
    return weights.load_model(
        config.weights,
        config.model,
        dtype=torch.float32,
        device=device,
        allow_missing=config.allow_missing,
    )


def _read(loader: Loader) -> tuple[Batch, Exception | None]:
    """Return the next batch, or the error, which the other processes have to know of first."""
    try:
        return next(loader), None
    except Exception as failure:
        return {}, failure


def _no_data(failure: Exception | None, step: int, config: TrainConfig) -> Exception:
    """Return the loader's error, of this process or another, with how to continue."""
    saved = f"Step {step - 1} is saved" if step else "No step is lost"
    advice = f"{saved}. Continue with --resume"
    if not isinstance(failure, EpisodeError):  # which says how to leave out its episode
        without = leave_out_any(config.pipelines())
        advice += f"; if an episode is at fault, without it: --resume {without}"
    if failure is None:
        return TrainingStopped(f"Another process could not read its data. {advice}")
    failure.add_note(advice)
    return failure


def _stopped(signals: StopSignals, step: int) -> TrainingStopped:
    """Return the error for a stop; its exit code is 128 plus the number of the signal."""
    asked = signals.received
    by = "a signal to another process" if asked is None else asked.name
    return TrainingStopped(
        f"Stopped by {by} after step {step}, which is saved. Continue with --resume.",
        128 + (asked or signal.SIGTERM),
    )


def _is_due(step: int, interval: int) -> bool:
    return step > 0 and step % interval == 0
