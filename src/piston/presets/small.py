"""Presets of small models: `debug` on random samples, `tiny` for simulated tasks and own robots.

The tiny models learn a task on two CPU cores in minutes. They differ from the full-size ones in
their sizes, and have a convolutional stem instead of the vision tower, which needs pre-training.
"""

import dataclasses

from piston.config import AdamW, CosineDecaySchedule, MixtureDataConfig, TrainConfig
from piston.models.configs import GEMMA, VISION, GemmaSize, Pi0Config, Pi0FASTConfig, VisionSize
from piston.robots.aloha import LeRobotAlohaDataConfig
from piston.robots.description import DescribedRobotDataConfig
from piston.robots.image_text import ImageTextDataConfig
from piston.robots.simple import FakeDataConfig, LeRobotMetaworldDataConfig

_VLM = GemmaSize(width=128, depth=4, mlp_dim=512, num_heads=4, num_kv_heads=1, head_dim=16)
_EXPERT = dataclasses.replace(_VLM, width=64, mlp_dim=256)
_STEM = VisionSize(width=128, depth=0, mlp_dim=128, num_heads=4, patch=16, stem=16)
_ALOHA = Pi0Config(
    action_dim=14,
    action_horizon=16,
    max_token_len=48,
    # On CPUs without matrix units for bfloat16, float32 is faster at this size.
    dtype="float32",
    vision=_STEM,
    vlm=_VLM,
    action_expert=_EXPERT,
    vocab_size=259,
    image_size=96,
    cameras=("base_0_rgb",),
    tokenizer="bytes",
)

# Questions are longer than the prompts of tasks.
_ALOHA_TEXT = dataclasses.replace(_ALOHA, targets=("text",), max_token_len=64, max_text_len=32)
_METAWORLD = dataclasses.replace(
    _ALOHA, action_dim=4, action_horizon=8, max_token_len=24, image_size=64
)
# Any robot of up to 32 dimensions; its prompts may be longer than those of one task.
_ROBOT = dataclasses.replace(_ALOHA, action_dim=32, max_token_len=96, cameras=Pi0Config().cameras)


def _schedule(num_steps: int) -> CosineDecaySchedule:
    return CosineDecaySchedule(warmup_steps=50, peak_lr=2e-3, decay_steps=num_steps, decay_lr=2e-5)


_CUBE = LeRobotAlohaDataConfig(
    repo_id="data/aloha_transfer_cube",
    prompt_from_task=True,
    # A model that is trained from scratch can use the simulated robot's own conventions.
    adapt_to_pi=False,
    use_delta_joint_actions=False,
    norm_floor=0.01,
    # In demonstrations without errors the state alone predicts what comes next, and a policy that
    # relies on it ignores the image.
    state_noise=0.02,
    action_stride=8,
)
_FIVE_SENTENCES = LeRobotMetaworldDataConfig(
    repo_id="data/metaworld", prompt_from_task=True, norm_floor=0.01
)
_ALOHA_SIM = TrainConfig(
    name="tiny_aloha_sim",
    model=_ALOHA,
    data=_CUBE,
    augmentation=False,
    batch_size=16,
    noise_draws=8,
    # Later the gripper covers what it reaches for.
    start_frames=48,
    start_weight=3,
    num_workers=0,
    cache_frames=True,
    num_train_steps=1_500,
    log_interval=100,
    save_interval=1_000_000,
    keep_period=None,
    lr_schedule=_schedule(1_500),
    optimizer=AdamW(weight_decay=1e-4),
    ema_decay=0.99,
)

_METAWORLD_TRAINING = dataclasses.replace(
    _ALOHA_SIM,
    name="tiny_metaworld",
    model=_METAWORLD,
    data=_FIVE_SENTENCES,
    batch_size=32,
    noise_draws=2,
    start_frames=0,
    start_weight=1,
    num_train_steps=2_600,
    lr_schedule=_schedule(2_600),
)
_METAWORLD_FAST = dataclasses.replace(
    _METAWORLD,
    targets=("fast",),
    # The built-in tokenizer has 256 codes, beside 259 ids of text and 128 that are skipped.
    fast_tokenizer="bytes",
    vocab_size=643,
    max_fast_len=64,
)

_DUMMY_PI0 = Pi0Config(vision=VISION["dummy"], vlm=GEMMA["dummy"], action_expert=GEMMA["dummy"])
_DUMMY_FAST = Pi0FASTConfig(
    action_dim=8, action_horizon=8, vision=VISION["dummy"], vlm=GEMMA["dummy"]
)
_DEBUG = TrainConfig(
    name="debug",
    exp_name="debug",
    model=_DUMMY_PI0,
    data=FakeDataConfig(),
    batch_size=2,
    num_train_steps=10,
    save_interval=100,
)

PRESETS = (
    _ALOHA_SIM,
    dataclasses.replace(
        _ALOHA_SIM,
        name="tiny_aloha_insertion",
        data=dataclasses.replace(_CUBE, repo_id="data/aloha_insertion"),
        num_train_steps=3_000,
        lr_schedule=_schedule(3_000),
    ),
    _METAWORLD_TRAINING,
    dataclasses.replace(
        _METAWORLD_TRAINING,
        name="tiny_metaworld_ki",
        model=dataclasses.replace(_METAWORLD_FAST, insulate=True),
    ),
    dataclasses.replace(
        _ALOHA_SIM,
        name="tiny_aloha_subtasks",
        model=_ALOHA_TEXT,
        data=dataclasses.replace(_CUBE, subtasks=True),
    ),
    dataclasses.replace(
        _ALOHA_SIM,
        name="tiny_two_robots",
        # On CPUs with fast bfloat16 products a step takes two thirds of the time.
        model=dataclasses.replace(_ALOHA_TEXT, dtype="bfloat16"),
        data=MixtureDataConfig(
            {
                "aloha": dataclasses.replace(_CUBE, subtasks=True, share=3),
                "metaworld": dataclasses.replace(_FIVE_SENTENCES, share=6),
                "questions": ImageTextDataConfig(repo_id=_CUBE.repo_id, share=1),
            }
        ),
        mask_padded_dims=True,
        mask_padded_steps=True,
        batch_size=32,
        noise_draws=4,
        num_train_steps=4_600,
        lr_schedule=_schedule(4_600),
    ),
    dataclasses.replace(
        _ALOHA_SIM,
        name="tiny_robot",
        model=_ROBOT,
        data=DescribedRobotDataConfig(prompt_from_task=True, norm_floor=0.01),
        mask_padded_dims=True,
        start_frames=0,
        start_weight=1,
    ),
    _DEBUG,
    dataclasses.replace(
        _DEBUG, name="debug_restore", weights="./checkpoints/debug/debug/9", save_interval=1_000
    ),
    dataclasses.replace(
        _DEBUG,
        name="debug_pi05",
        exp_name="debug_pi05",
        model=dataclasses.replace(_DUMMY_PI0, pi05=True),
        save_interval=1_000,
    ),
    dataclasses.replace(_DEBUG, name="debug_fast", exp_name="debug_fast", model=_DUMMY_FAST),
)
