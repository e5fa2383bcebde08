"""Write this folder, as it was done once with version 0.2.0.dev0. Tests read it and write nothing.

    OMP_NUM_THREADS=1 python tests/reference/0.2.0.dev0/make_baseline.py

    files.tar.xz
      data/, assets/ small recorded datasets, and their statistics
      runs/          runs that ended half-way, with optimizer and EMA: <run>/half/<step>
      recording/     what `piston serve --record` wrote
    <run>.npz        requests (<number>|request|…) with replies of the stored checkpoint (|reply|)
                     and of the last checkpoint of the run when it was not cut (|end|)
    <run>.json       metrics of its last steps when it was not cut; what clients are told
    recording.npz    the requests that were recorded, with their replies
    exported.npz     requests and replies of the checkpoint of π0 when `piston export` compiled it

Locations in checkpoints are relative to the folder that holds data/ and runs/.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
os.chdir(HERE)
os.environ["PISTON_PRESETS"] = "my_presets.py"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import piston  # noqa: E402
from piston import presets  # noqa: E402
from piston.cli import main  # noqa: E402
from piston.config import (  # noqa: E402
    AssetsConfig,
    CosineDecaySchedule,
    MixtureDataConfig,
    RsqrtDecaySchedule,
)
from piston.data.language import Question  # noqa: E402
from piston.data.recorder import Recorder  # noqa: E402
from piston.models.configs import LoRA, Pi0FASTConfig  # noqa: E402
from piston.robots import RobotInputs  # noqa: E402
from piston.robots.aloha import LeRobotAlohaDataConfig  # noqa: E402
from piston.robots.description import DescribedRobotDataConfig, read_robot  # noqa: E402
from piston.robots.image_text import ImageTextDataConfig  # noqa: E402
from piston.robots.simple import LeRobotLiberoDataConfig  # noqa: E402
from piston.training.loop import train_loop  # noqa: E402
from piston_client import Client  # noqa: E402

PIXELS = 20
TIMES = ("samples_per_second", "waiting_for_data")
# After how many steps the stored run ended, and the one that was not cut.
STEPS = {"subtasks": (114, 120), "mixture": (295, 300), "pi0_fast": (395, 400)}
USUAL_STEPS = (3, 6)
FOLDERS = ("data", "assets", "runs", "recording")
FRONT, STATE = "observation.images.front", "observation.state"
ARM = ("base", "elbow", "gripper")
DARK, BRIGHT = 30, 220
CART = RobotInputs(
    name="cart",
    cameras={"mast": "base_0_rgb", "bumper": "left_wrist_0_rgb"},
    state={"wheels": ("left", "right")},
    actions={"speed": ("left", "right")},
    columns={},
    rate=20,
)
LIT = (BRIGHT, "lift", "lit")


def record_all():
    wheels, joints = ("base", "elbow"), tuple(f"joint_{i}" for i in range(14))
    pose, fingers = ("x", "y", "z", "rx", "ry", "rz"), ("finger_0", "finger_1")
    gripper_scale = (1, 1, 0.08)
    record("arm", 10, [FRONT], {STATE: ARM, "action": ARM}, gripper_scale, labelled=True)
    record("arm_more", 10, [FRONT], {STATE: ARM, "action": ARM}, gripper_scale, seed=1)
    record("cart", 20, ["mast", "bumper"], {"wheels": wheels, "speed": wheels}, 30)
    record("aloha", 50, ["observation.images.top"], {STATE: joints, "action": joints}, 0.3)
    poses = {"state": (*pose, *fingers), "actions": (*pose, "gripper")}
    record("libero", 10, ["image", "wrist_image"], poses, 1)


def record(name, fps, cameras, columns, scale, *, labelled=False, seed=0):
    """Record two episodes of 8 frames; the first half of each is dark.

    `columns` are those of the state and the actions, which are half of the state.
    """
    random = np.random.default_rng(seed)
    (state, dims), (action, names) = columns.items()
    numbers = {
        key: {"dtype": "float32", "shape": (len(of),), "names": list(of)}
        for key, of in columns.items()
    }
    camera = {"dtype": "image", "shape": (PIXELS, PIXELS, 3)}
    features = {**dict.fromkeys(cameras, camera), **numbers}
    with Recorder(Path("data", name), fps, features, language=labelled) as recorder:
        for episode in range(2):
            for step in range(8):
                brightness, word, answer = (DARK, "reach", "dark") if step < 4 else LIT
                position = random.uniform(0, 0.5, len(dims)) + 0.5 * (step >= 4)
                position = (scale * position).astype(np.float32)
                frame = {camera: image(random, brightness) for camera in cameras}
                frame |= {state: position, action: 0.5 * position[: len(names)]}
                labels = {}
                if labelled:
                    question = Question(FRONT, "how bright?", answer)
                    labels = {"subtask": word, "questions": [question]}
                recorder.add_frame(frame, f"take cup {episode}", **labels)
            recorder.save_episode()


def image(random, brightness=100):
    return random.integers(brightness, brightness + 30, (PIXELS, PIXELS, 3), np.uint8)


def runs():
    """Return the configurations by the runs' names."""
    tiny = presets.get("degrees_cart")
    model = tiny.model
    described = data(DescribedRobotDataConfig, "arm", description=read_robot("arm.toml"))
    two_sets = dataclasses.replace(
        described, extra_datasets=("data/arm_more#0:1",), set_shares=(2.0, 1.0)
    )
    room = {"max_token_len": 48, "max_text_len": 8}
    writes = dataclasses.replace(model, targets=("text",), **room)
    codes = {"vocab_size": 259 + 256 + 128, "fast_tokenizer": "bytes"}
    both = dataclasses.replace(
        model, targets=("text", "fast"), insulate=True, pi05=True, max_fast_len=56, **room, **codes
    )
    sizes = {f.name: getattr(model, f.name) for f in dataclasses.fields(Pi0FASTConfig)[:10]}
    sizes |= {"cameras": model.cameras, "tokenizer": "bytes", **codes}
    sizes |= {"action_dim": 7, "max_token_len": 120, "max_decoding_steps": 40}
    fast = Pi0FASTConfig(**sizes)
    lora = dataclasses.replace(model.vlm, lora=LoRA(2, 2.0))
    libero = data(LeRobotLiberoDataConfig, "libero")
    repack = dataclasses.replace(LeRobotAlohaDataConfig(), cameras={"cam_high": "base_0_rgb"})
    aloha = dataclasses.replace(
        repack, **fields(data(LeRobotAlohaDataConfig, "aloha"), "repo_id", "assets")
    )
    changes = {
        "pi0": {
            "model": dataclasses.replace(model, action_dim=16, max_delay=2),
            "data": dataclasses.replace(aloha, prompt_from_task=True, action_stride=2),
            "start_frames": 2,
            "start_weight": 3,
            "noise_draws": 2,
            "policy_metadata": {"reset_pose": [0.0] * 14},
        },
        "pi05": {
            "model": dataclasses.replace(model, pi05=True, action_dim=8, max_token_len=80),
            "data": libero,
            "augmentation": True,
            "gradient_accumulation": 2,
        },
        "pi0_fast": {
            "model": fast,
            "data": libero,
            "lr_schedule": CosineDecaySchedule(5, 1e-2, decay_steps=400, decay_lr=1e-3),
        },
        "mixture": {
            "model": both,
            "data": MixtureDataConfig(
                {
                    "arm": dataclasses.replace(described, subtasks=True, share=2),
                    "cart": data(DescribedRobotDataConfig, "cart", description=CART, share=1),
                    "questions": ImageTextDataConfig(repo_id="data/arm", share=1),
                }
            ),
            "mask_padded_dims": True,
            "mask_padded_steps": True,
            "lr_schedule": CosineDecaySchedule(5, 1e-2, decay_steps=300, decay_lr=1e-3),
        },
        "subtasks": {
            "model": writes,
            "data": dataclasses.replace(described, subtasks=True),
            "lr_schedule": CosineDecaySchedule(5, 1e-2, decay_steps=120, decay_lr=1e-3),
            "ema_decay": None,
        },
        "robot_file": {"data": described},
        "lora": {
            "model": dataclasses.replace(model, vlm=lora),
            "data": described,
            "weights": "runs/robot_file/half/2",
            "allow_missing": ("*lora*",),
            "freeze": ("vlm.*", "!*lora*"),
        },
        "rsqrt": {
            "data": described,
            "lr_schedule": RsqrtDecaySchedule(warmup_steps=2, peak_lr=1e-2, timescale=3.0),
            "max_skipped_steps": 3,
            "validation_episodes": 1,
            "validation_interval": 2,
        },
        "shares": {"data": two_sets},
    }
    return {
        name: dataclasses.replace(
            tiny, name=name, exp_name="half", checkpoint_base_dir="runs", **change
        )
        for name, change in changes.items()
    }


def data(kind, name, **more):
    assets = AssetsConfig(assets_dir="assets", asset_id=name)
    return kind(repo_id=f"data/{name}", assets=assets, prompt_from_task=True, **more)


def fields(value, *names):
    return {name: getattr(value, name) for name in names}


def requests(name):
    """Yield requests for a run's checkpoint; those of a mixture say of which robot they are."""
    for number in range(3):
        random = np.random.default_rng([number, 7])
        brightness = BRIGHT if number == 1 else DARK
        arm = {
            FRONT: image(random, brightness),
            STATE: (random.uniform(0, 1, 3) * [1, 1, 0.08]).astype(np.float32),
            "prompt": "take cup 0",
            "seed": number,
        }
        keys = ("mast", "bumper", "wheels") if name == "mixture" else ("front", "rear", "joints")
        values = (image(random), image(random), random.uniform(0, 30, 2).astype(np.float32))
        cart = {**dict(zip(keys, values)), "prompt": "take cup 1", "seed": number}
        if name == "pi0":
            yield {
                "images": {"cam_high": image(random).transpose(2, 0, 1)},
                "state": random.uniform(0, 0.3, 14).astype(np.float32),
                "prompt": "take cup 0",
                "seed": number,
            }
        elif name in ("pi05", "pi0_fast"):
            yield {
                "observation/image": image(random, brightness),
                "observation/wrist_image": image(random, brightness),
                "observation/state": random.uniform(0, 1, 8).astype(np.float32),
                "prompt": "take cup 1",
                **({"seed": number} if name == "pi05" else {}),
            }
        elif name == "degrees_cart":
            yield cart
        elif name == "mixture":
            yield {**arm, "robot": "arm"}
            yield {**cart, "robot": "cart"}
            yield {FRONT: arm[FRONT], STATE: arm[STATE], "question": "how bright?", "robot": "arm"}
        else:
            yield arm


def ask(name, checkpoint):
    """Return requests with the checkpoint's replies, with real-time requests where it can."""
    found = list(requests(name))
    if name == "pi0":
        for request, reply in answer(checkpoint, found):
            rtc = {"previous_chunk": reply["actions"][2:], "delay": 1, "execute_horizon": 2}
            found += [{**request, "rtc": {**rtc, "kind": kind}} for kind in ("guided", "trained")]
    return answer(checkpoint, found)


def answer(checkpoint, found):
    robots = {request.get("robot") for request in found}
    policies = {robot: piston.load_policy(checkpoint, robot=robot) for robot in robots}
    return [(request, policies[request.get("robot")].infer(request)) for request in found]


def save(file, cases, end=()):
    arrays = {}
    for number, (request, reply) in enumerate(cases):
        arrays |= flat(request, f"{number}|request") | flat(known(reply), f"{number}|reply")
    for number, (_, reply) in enumerate(end):
        arrays |= flat(known(reply), f"{number}|end")
    np.savez_compressed(file, **arrays)


def known(reply):
    return {key: reply[key] for key in ("actions", "subtask", "answer") if key in reply}


def flat(values, prefix):
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}|{key}")
        else:
            found[f"{prefix}|{key}"] = np.asarray(value)
    return found


def train(name, config, work):
    """Run to the end in another folder, and to the middle in this one."""
    cut, steps = STEPS.get(name, USUAL_STEPS)
    uncut = dataclasses.replace(config, num_train_steps=steps, checkpoint_base_dir=str(work))
    last = train_loop(uncut)
    half = train_loop(dataclasses.replace(config, num_train_steps=cut))
    describe(name, half, last)


def describe(name, half, last):
    """Write what the stored checkpoint and that of the run that was not cut reply."""
    lines = [json.loads(line) for line in (last.parent / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if k not in TIMES} for line in lines]
    metadata = piston.load_policy(half, robot="arm" if name == "mixture" else None).metadata
    described = {"metrics": kept[-8:], "metadata": metadata}
    Path(f"{name}.json").write_text(json.dumps(described, indent=1) + "\n")
    cases = ask(name, half)
    save(f"{name}.npz", cases, answer(last, [request for request, _ in cases]))
    clean(half.parent)


def clean(run):
    """Remove what says where this was made, and what resuming does not need."""
    for name in ("history.jsonl", "first_batch.png"):
        (run / name).unlink(missing_ok=True)
    run.with_name(f".{run.name}.lock").unlink(missing_ok=True)


def record_server(checkpoint):
    """Serve a checkpoint with --record, as a command, and ask it in two sentences."""
    command = [sys.executable, "-m", "piston.cli", "serve", str(checkpoint), "--port", "8765"]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--record", "recording"])
    cases = []
    try:
        with Client("127.0.0.1:8765", connect_timeout=60) as client:
            for number, request in enumerate(requests("pi0")):
                larger = request["images"]["cam_high"].repeat(3, 1).repeat(4, 2)
                request = {
                    **request,
                    "images": {"cam_high": larger},
                    "prompt": f"cup {number // 2}",
                }
                cases.append((request, client.infer(request)))
                time.sleep(0.1)
    finally:
        process.terminate()
        process.wait()
    save("recording.npz", cases)


def main_program():
    for old in FOLDERS:
        shutil.rmtree(old, ignore_errors=True)
    record_all()
    configs = runs()
    for name, run in {"arm": "rsqrt", "aloha": "pi0", "libero": "pi05"}.items():
        write_statistics(name, configs[run])
    write_statistics("degrees_cart", presets.get("degrees_cart"))
    cart = configs["mixture"].for_robot("cart")
    write_statistics("cart", cart)
    pi0 = Path("runs/pi0/half/2")
    with tempfile.TemporaryDirectory() as folder:
        configs["lora"] = configs.pop("lora")  # after the run that it starts from
        for name, config in configs.items():
            train(name, config, folder)
        command = ["train", "degrees_cart", "--exp-name", "half"]
        assert main([*command, "--checkpoint-base-dir", folder]) == 0
        assert main([*command, "--checkpoint-base-dir", "runs", "--num-train-steps", "3"]) == 0
        last = Path(folder, "degrees_cart/half/5")
        describe("degrees_cart", Path("runs/degrees_cart/half/2"), last)
        export(pi0, Path(folder, "policy.pt2"))
    record_server(pi0)
    pack()


def pack():
    def without_origin(member):
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if member.name.endswith(".lock") else member

    with tarfile.open("files.tar.xz", "w:xz", preset=9) as archive:
        for folder in FOLDERS:
            archive.add(folder, filter=without_origin)
            shutil.rmtree(folder)


def write_statistics(name, config):
    from piston.data.pipeline import open_source
    from piston.data.statistics import TransformedColumns, compute_statistics
    from piston.transforms.normalize import write_norm_stats

    pipeline = config.data_config()
    columns = TransformedColumns(
        open_source(pipeline, config.model), pipeline, config.model.action_horizon
    )
    found = compute_statistics([columns])
    write_norm_stats(Path("assets", name), {k: v.norm_stats for k, v in found.items()})


def export(checkpoint, file):
    assert main(["export", str(checkpoint), str(file), "--num-steps", "2", "--max-batch", "2"]) == 0
    policy = piston.load_policy(file)
    save("exported.npz", [(request, policy.infer(request)) for request in requests("pi0")])


if __name__ == "__main__":
    main_program()
