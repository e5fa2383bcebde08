"""A run of a few seconds: a small ALOHA-like set, recorded and trained on, and an evaluation."""

import dataclasses
from pathlib import Path

import numpy as np

from piston import presets
from piston.config import AssetsConfig, TrainConfig
from piston.data.record import Recorder
from piston.data.record.encoding import VideoEncoding, encode_video
from piston.models.configs import GemmaSize, VisionSize
from piston.robots.aloha import DIM
from piston.sim.scores import Evaluation, Outcome, Trace, latency_percentiles
from piston.transforms.normalize import NormStats, write_norm_stats

PIXELS, FPS, NUM_FRAMES, NUM_EPISODES = 32, 10, 40, 3
HORIZON, STRIDE = 6, 2
NAMES = [f"joint_{dim}" for dim in range(DIM)]
_EXPERT = GemmaSize(width=16, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
_STEM = VisionSize(width=16, depth=0, mlp_dim=16, num_heads=2, patch=16, stem=8)


def record(folder: Path) -> None:
    features = {
        "observation.images.top": {"dtype": "video", "shape": (PIXELS, PIXELS, 3)},
        "observation.state": {"dtype": "float32", "shape": (DIM,), "names": NAMES},
        "action": {"dtype": "float32", "shape": (DIM,), "names": NAMES},
    }
    with Recorder(folder, FPS, features, "aloha", codec="h264") as recorder:
        for episode in range(NUM_EPISODES):
            for step in range(NUM_FRAMES):
                recorder.add_frame(_frame(episode, step), "wave <both> arms")
            recorder.save_episode()


def _frame(episode: int, step: int) -> dict[str, np.ndarray]:
    image = np.full((PIXELS, PIXELS, 3), 60, np.uint8)
    image[8:24, step * PIXELS // NUM_FRAMES :][:, :6] = (220, 60, 40)
    angles = np.sin(step / 8 + np.arange(DIM) + episode).astype(np.float32)
    return {"observation.images.top": image, "observation.state": angles, "action": 0.9 * angles}


def config(root: Path, **changes) -> TrainConfig:
    """The preset of the demo, smaller still; one episode is held out."""
    preset = presets.get("tiny_aloha_sim")
    model = dataclasses.replace(
        preset.model,
        action_horizon=HORIZON,
        image_size=PIXELS,
        vision=_STEM,
        vlm=_EXPERT,
        action_expert=_EXPERT,
    )
    data = dataclasses.replace(
        preset.data,
        repo_id=str(root / "data"),
        assets=AssetsConfig(asset_id="aloha"),
        action_stride=STRIDE,
    )
    settings = {
        "exp_name": "tested",
        "model": model,
        "data": data,
        "batch_size": 2,
        "noise_draws": 1,
        "start_frames": 0,
        "start_weight": 1,
        "num_train_steps": 4,
        "log_interval": 1,
        "validation_episodes": 1,
        "validation_interval": 2,
        "cache_frames": False,
        "assets_base_dir": str(root / "assets"),
        "checkpoint_base_dir": str(root / "checkpoints"),
    }
    return dataclasses.replace(preset, **settings | changes)


def write_statistics(config: TrainConfig) -> None:
    ones = np.ones(DIM)
    stats = NormStats(mean=0.1 * ones, std=0.7 * ones, q01=-ones, q99=ones)
    write_norm_stats(config.assets_dirs / "aloha", {"state": stats, "actions": stats})


def write_evaluation(folder: Path, prompt: str = "wave <both> arms") -> Evaluation:
    """Seed 0 succeeds, 1 loses it again, 2 fails; a video of the first and the last."""
    outcomes = tuple(
        Outcome(seed, prompt, success=seed < 2, held=seed == 0, steps=10 + seed, initial_state={})
        for seed in range(3)
    )
    random = np.random.default_rng(0)
    trace = Trace(
        *(0, tuple(NAMES), 50.0, (0, 4)),
        chunks=random.normal(size=(2, 6, DIM)).round(5),
        executed=random.normal(size=(8, DIM)).round(5),
    )
    latency = latency_percentiles((0.010, 0.020, 0.030))
    videos = tuple(folder / "videos" / f"{name}.mp4" for name in ("success_seed0", "failure_seed2"))
    evaluation = Evaluation(
        *("some_task", "ws://127.0.0.1:9", 8, outcomes, latency), videos=videos, trace=trace
    )
    evaluation.write(folder)
    frames = [np.full((48, 64, 3), shade, np.uint8) for shade in range(0, 250, 10)]
    (folder / "videos").mkdir(exist_ok=True)
    for path, images in zip(videos, (frames, frames[::-1])):
        encode_video(iter(images), path, 25, VideoEncoding.choose("h264"))
    return evaluation
