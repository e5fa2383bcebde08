"""The training loop, from a configuration to checkpoints that can be served."""

from __future__ import annotations

import functools
import logging
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from piston import weights
from piston.config import DataConfig, TrainConfig
from piston.data.format import EpisodeError
from piston.data.loader import Batch, Loader, Order
from piston.data.mixture import RepeatedStarts, Samples, WeightedMixture, mixed
from piston.data.pipeline import (
    leave_out,
    open_sources,
    open_training_data,
    split_sources,
)
from piston.data.statistics import require_finite
from piston.models.model import Model
from piston.progress import ProgressBar
from piston.signals import StopSignals
from piston.training.checkpoint import (
    CheckpointWriter,
    Statistics,
    restore,
    warn_of_other_statistics,
)
from piston.training.distributed import Processes, join_processes
from piston.training.run import (
    Run,
    begin,
    check_freeze,
    check_weights,
    open_run,
    read_statistics,
)
from piston.training.step import StepOutput, StepResult, Trainer
from piston.training.trackers import (
    Meter,
    Trackers,
    check_logins,
    make_trackers,
    require_trackers,
    save_first_batch,
)
from piston.training.validation import Validation

logger = logging.getLogger(__name__)


class TrainingStopped(RuntimeError):
    """The run ended before its last step; the message says why and what to do."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def train_loop(config: TrainConfig) -> Path:
    """Train as configured and return the folder of the last checkpoint."""
    # Cheap checks come first, so that nobody waits an hour for a missing file.
    require_trackers(config)
    pipeline = read_statistics(config)
    action_stats = (pipeline.norm_stats or {}).get("actions")
    if action_stats is None and config.mask_padded_dims:
        raise ValueError("--mask-padded-dims needs statistics: they tell the robot's dimensions.")
    robot_dim = None if action_stats is None else action_stats.dim
    check_freeze(config)
    with ExitStack() as stack:
        processes = stack.enter_context(join_processes(config))
        run = stack.enter_context(open_run(config, processes))
        if processes.is_first:
            check_logins(config)
        if run.resumed is None:
            check_weights(config)

        # Data.
        training, held_out = _open_data(config, pipeline, processes)
        order = Order(
            training,
            config.batch_size,
            seed=config.seed,
            rank=processes.rank,
            world_size=processes.world_size,
        )
        loader = stack.enter_context(Loader(training, order, num_workers=config.num_workers))
        validation = None if held_out is None else Validation(held_out, processes, robot_dim)

        # Model and optimizer.
        statistics = None
        if pipeline.norm_stats is not None and pipeline.asset_id is not None:
            statistics = Statistics(pipeline.asset_id, pipeline.norm_stats)
        trainer = Trainer(config, _initial_model(config, processes, run), processes, robot_dim)
        meter = Meter(config.batch_size)
        if run.resumed_folder is not None:
            progress = restore(trainer, run.resumed_folder)
            loader.load_state_dict(progress["loader"])
            meter.load_state_dict(progress["meter"])
            logger.info("Resumed %s after step %d", run.folder, run.resumed)
            if processes.is_first:
                warn_of_other_statistics(run.resumed_folder, statistics)

        # From here on files are written.
        begin(run, config, processes)
        writer = stack.enter_context(CheckpointWriter(config, run.folder, processes, statistics))
        trackers = Trackers([])
        if processes.is_first:
            trackers = make_trackers(config, run.folder, run.first_step)
        stack.callback(trackers.close)
        bar = _progress_bar(config, run) if processes.is_first else None
        if bar is not None:
            stack.enter_context(bar)
        signals = stack.enter_context(StopSignals("finishing the step, then saving."))

        last_step = config.num_train_steps - 1
        results = _Results(config, trainer, meter, several_sets=bool(pipeline.more_sets))
        meter.start_clock()
        for step in range(run.first_step, config.num_train_steps):
            before, begun = loader.state_dict(), time.perf_counter()
            batch, failure = _read(loader)
            waited = time.perf_counter() - begun
            # Everything that the processes have to agree on in a step, in one small all-reduce.
            failed, stopping, weight = processes.sum(
                failure is not None,
                signals.received is not None and step > run.first_step,
                trainer.weight(batch) if failure is None else 0.0,
            )
            if failed or stopping:
                results.read()
                progress = {"loader": before, "meter": meter.state_dict()}
                if step > run.first_step and not _is_due(step - 1, config.save_interval):
                    writer.save(trainer, step - 1, progress, last=True)
                writer.finish()
                if failed:
                    raise _without_data(failure, step, pipeline)
                raise _stopped(signals.received, step - 1)
            if step == 0 and processes.is_first:
                save_first_batch(batch, run.folder / "first_batch.png")

            results.add(step, trainer.step(batch, step, weight), batch)
            meter.count_step(waited)
            is_last = step == last_step
            is_logged = step % config.log_interval == 0 or is_last
            is_saved = _is_due(step, config.save_interval) or is_last
            if is_logged or is_saved or results.num_unread == config.max_skipped_steps:
                results.read()
            if bar is not None:
                bar.show(step + 1, note=str(meter))
            if is_logged:
                trackers.log(step, meter.metrics())
                if processes.is_first:
                    left = meter.time_left(last_step - step)
                    logger.info("step %d/%d  %s  %s left", step, last_step + 1, meter, left)
                meter.begin_interval()
            with meter.paused():
                if validation and (_is_due(step, config.validation_interval) or is_last):
                    metrics = validation.run(trainer)
                    trackers.log(step, metrics)
                    if processes.is_first:
                        shown = [f"{k} {v:.4f}" for k, v in metrics.items() if type(v) is float]
                        logger.info("step %d  %s", step, "  ".join(shown))
                if is_saved:
                    progress = {"loader": loader.state_dict(), "meter": meter.state_dict()}
                    writer.save(trainer, step, progress, last=is_last)
        writer.finish()
    return run.folder / str(max(last_step, run.resumed or 0))


def _progress_bar(config: TrainConfig, run: Run) -> ProgressBar:
    return ProgressBar(
        config.exp_name,
        "steps",
        config.num_train_steps,
        done=run.first_step,
        after=0,
        note_width=55,
        logs=False,  # the loop logs a line per interval
    )


def _open_data(
    config: TrainConfig, pipeline: DataConfig, processes: Processes
) -> tuple[Samples, Samples | None]:
    """Open the training data and, if asked for, the held-out episodes."""
    if pipeline.fake:
        several = config.data.more_sets or config.data.set_shares
        if config.validation_episodes or config.start_frames or several:
            raise ValueError(
                "--validation-episodes, --start-frames and --data.more-sets need a data set; "
                "random samples have no episodes."
            )
        return open_training_data(pipeline, config.model), None
    sets, sources = pipeline.each_set(), open_sources(pipeline, config.model)
    for one, source in zip(sets, sources):
        require_finite(source, one, one.steps_read(config.model.action_horizon))
    parts = [([episode.index for episode in source.episodes], list[int]()) for source in sources]
    if config.validation_episodes:
        parts = split_sources(sources, config.validation_episodes, seed=config.seed)
    training, held_out = [], []
    for one, source, (kept, chosen) in zip(sets, sources, parts):
        read = functools.partial(
            open_training_data,
            one,
            config.model,
            source=source,
            cache_frames=config.cache_frames,
        )
        samples = read(episodes=kept)
        if config.start_frames:
            lengths = [episode.length for episode in source.episodes if episode.index in kept]
            samples = RepeatedStarts(samples, lengths, config.start_frames, config.start_weight)
        training.append(samples)
        if chosen:
            held_out.append(read(episodes=chosen))
    everything = mixed(training, pipeline.set_shares)
    if isinstance(everything, WeightedMixture) and processes.is_first:
        _log_sets(sets, everything, parts)
    return everything, mixed(held_out) if held_out else None


def _log_sets(
    sets: Sequence[DataConfig], mixture: WeightedMixture, parts: Sequence[tuple[Sequence[int], ...]]
) -> None:
    rows = zip(sets, mixture.datasets, mixture.weights, parts)
    for one, samples, weight, (kept, chosen) in rows:
        logger.info(
            "Set %d: %s, %d episodes, %d samples, %.1f %% of the samples drawn%s",
            *(one.set_index, one.repo_id, len(kept), len(samples), 100 * weight),
            f"; {len(chosen)} episodes held out" if chosen else "",
        )


def _initial_model(config: TrainConfig, processes: Processes, run: Run) -> Model:
    """Return float32 master weights: loaded, random, or empty if the run is resumed."""
    # FSDP moves a model to its device in parts; the whole may not fit there.
    device = torch.device("cpu") if config.sharding == "fsdp" else processes.device
    torch.manual_seed(config.seed)
    if run.resumed_folder is not None:
        return weights.build_on_meta(config.model).to_empty(device=device)
    if config.weights is None:
        return weights.build_model(config.model).to(device)
    return weights.load_model(
        config.weights,
        config.model,
        dtype=torch.float32,
        device=device,
        may_be_new=config.may_be_new,
    )


def _read(loader: Loader) -> tuple[Batch, Exception | None]:
    """Return the next batch, or the error, which the other processes have to know of first."""
    try:
        return next(loader), None
    except Exception as failure:
        return {}, failure


def _without_data(failure: Exception | None, step: int, pipeline: DataConfig) -> Exception:
    """Return the loader's error, of this process or another, with how to continue."""
    saved = f"Step {step - 1} is saved" if step else "No step is lost"
    advice = f"{saved}. Continue with --resume"
    if not isinstance(failure, EpisodeError):  # which says how to leave out its episode
        without = leave_out(pipeline, ["N"])
        advice += f"; if an episode is at fault, without it: --resume {without}"
    if failure is None:
        return TrainingStopped(f"Another process could not read its data. {advice}")
    failure.add_note(advice)
    return failure


def _is_due(step: int, interval: int) -> bool:
    return step > 0 and step % interval == 0


class _Results:
    """The results of steps, read for several steps at once: reading waits for the device."""

    def __init__(
        self, config: TrainConfig, trainer: Trainer, meter: Meter, *, several_sets: bool
    ) -> None:
        self._config, self._trainer, self._meter = config, trainer, meter
        self._several_sets = several_sets
        self._unread: list[tuple[int, StepOutput, Sequence[Sequence[int]]]] = []

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def add(self, step: int, output: StepOutput, batch: Batch) -> None:
        places = [batch[key] for key in ("set_index", "episode_index", "frame_index")]
        self._unread.append((step, output, places))

    def read(self) -> None:
        """Count what was measured; raise TrainingStopped if too many steps were skipped."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        results = self._trainer.read([output for _, output, _ in unread])
        for (step, _, places), result in zip(unread, results):
            self._meter.add(result)
            if result.skipped:
                self._log_skipped(step, result, places)
                self._check_skipped()

    def _log_skipped(self, step: int, result: StepResult, places: Sequence[Sequence[int]]) -> None:
        frames = [
            f"{f'set {int(which)} ' if self._several_sets else ''}{int(episode)}/{int(frame)}"
            f"{' (!)' if number in result.bad_samples else ''}"
            for number, (which, episode, frame) in enumerate(zip(*places))
        ]
        logger.warning(
            "Step %d skipped: loss %s, gradient norm %s. Episode/frame of its samples, with (!) "
            "where the loss is not finite: %s",
            step,
            result.loss,
            result.gradient_norm,
            ", ".join(frames),
        )

    def _check_skipped(self) -> None:
        config, in_a_row = self._config, self._meter.skipped_in_a_row
        if in_a_row >= config.max_skipped_steps:
            without = leave_out(config.data_config(), ["N"])
            raise TrainingStopped(
                f"{in_a_row} steps in a row had a loss or gradient that is not finite; they "
                "changed no weights, and checkpoints are untouched. If few samples above have a "
                f"(!), leave their episodes out: --resume {without}. If most have it, lower the "
                f"learning rate: --resume --lr-schedule.peak-lr "
                f"{config.lr_schedule.peak_lr / 2:g}, or try --resume --model.dtype float32."
            )


def _stopped(asked: signal.Signals | None, step: int) -> TrainingStopped:
    """Return the error for a stop; its exit code is 128 plus the number of the signal."""
    by = "a signal to another process" if asked is None else asked.name
    code = 128 + (signal.SIGTERM if asked is None else asked)
    return TrainingStopped(
        f"Stopped by {by} after step {step}, which is saved. Continue with --resume.", code
    )
