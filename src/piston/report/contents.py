"""Everything that a page shows, gathered: what is there, and why the rest is not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from piston.inference import load_policy
from piston.report.evaluations import find_evaluations
from piston.report.prediction import Prediction, predict
from piston.report.run import Run, read_run
from piston.report.sample import Sample, choose_sample, read_pipeline
from piston.report.stages import Stages, read_stages
from piston.sim.scores import Evaluation

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Missing:
    """Why something is not shown, and how to get it."""

    why: str


@dataclasses.dataclass(frozen=True)
class Contents:
    run: Run
    evaluations: tuple[Evaluation, ...]
    stages: Stages | None
    sample: Sample | Missing
    prediction: Prediction | Missing

    @property
    def how_to_evaluate(self) -> str:
        checkpoint = self.run.checkpoint or self.run.folder / "STEP"
        return (
            f"Run: piston eval TASK --policy {checkpoint} --video --out {self.run.folder / 'eval'}"
        )


def gather(
    folder: Path,
    evaluations: Sequence[Path] = (),
    stages: Path | None = None,
    *,
    use_policy: bool = True,
) -> Contents:
    run = read_run(folder)
    sample, prediction = _look_at_policy(run, use_policy)
    return Contents(
        run=run,
        evaluations=tuple(find_evaluations(folder, evaluations)),
        stages=None if stages is None else read_stages(stages),
        sample=sample,
        prediction=prediction,
    )


def _look_at_policy(run: Run, use_policy: bool) -> tuple[Sample | Missing, Prediction | Missing]:
    if run.checkpoint is None:
        missing = Missing(
            "the run has no whole checkpoint yet. Train on, with --resume; the last step is saved."
        )
        return missing, missing
    if run.config.data_config().fake:
        missing = Missing("the run trained on random samples, of which there is nothing to see.")
        return missing, missing
    try:
        pipeline = read_pipeline(run.config, run.checkpoint)
        sample = choose_sample(run.config, pipeline)
    except (OSError, ValueError, KeyError) as error:
        # Everything else of the run can be shown all the same; the page says what this was.
        logger.warning("No sample of the run's data set: %s", error)
        missing = Missing(f"no sample of the run's data set. {error}")
        return missing, missing
    if not use_policy:
        return sample, Missing("the policy was not loaded. Leave out --no-policy.")
    policy = load_policy(run.checkpoint)
    return sample, predict(policy, pipeline, sample)
