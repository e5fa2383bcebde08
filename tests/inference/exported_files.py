"""Run by `test_exported.py` in a process of its own: what Inductor compiles, and exported files.

Both parts of π0 are compiled ahead of time, the loop of π0.5 when it is called.
"""

import dataclasses
import json
import zipfile

import numpy as np
import pytest
import torch
from tests.models import tiny
from tests.models.static_inputs import inputs_of
from torch.export.pt2_archive._package import load_pt2

import piston
from piston import presets, weights
from piston.cli import main
from piston.config import TRAIN_SECTION
from piston.inference.compiled import compile_graphs
from piston.models.configs import GemmaSize, VisionSize
from piston.models.static import StaticPrefill
from piston.robots.aloha import make_aloha_example
from piston.serialization import to_json
from piston.transforms.normalize import NormStats, write_norm_stats

GEMMA = GemmaSize(width=32, depth=1, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=8)
VISION = VisionSize(width=24, depth=1, mlp_dim=32, num_heads=2, patch=16)
STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def _compiled_sooner():
    """Kernels without vector instructions take a third less time to compile."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as the trainer writes it, of a tiny model."""
    preset = presets.get("pi0_aloha_sim")
    sizes = {"vision": VISION, "vlm": GEMMA, "action_expert": GEMMA, "vocab_size": 2_048}
    others = {"image_size": 64, "tokenizer": "bytes", "dtype": "float32", "action_horizon": 6}
    others["max_delay"] = 2
    model_config = dataclasses.replace(preset.model, **sizes, **others)
    config = dataclasses.replace(
        preset, model=model_config, exp_name="x", policy_metadata={"reset_pose": [0, 1]}
    )
    torch.manual_seed(0)
    model = weights.build_model(model_config)
    folder = tmp_path_factory.mktemp("run") / "9"
    weights.save_model(model, model_config, folder, sections={TRAIN_SECTION: to_json(config)})
    stats = NormStats(np.full(14, 0.5), np.full(14, 2.0), np.zeros(14), np.ones(14))
    asset = folder / "assets" / "lerobot/aloha_sim_transfer_cube_human"
    write_norm_stats(asset, {"state": stats, "actions": stats})
    return folder


@pytest.fixture(scope="module")
def file(checkpoint):
    path = checkpoint.parent / "policy.pt2"
    words = ["--num-steps", str(STEPS), "--max-batch", "3"]
    assert main(["export", str(checkpoint), str(path), *words]) == 0
    return path


def requests():
    """Observations with one to three cameras and prompts of different length."""
    example = make_aloha_example()
    names = ("cam_high", "cam_left_wrist", "cam_right_wrist")
    for count, prompt in ((3, "go"), (1, "transfer the cube to the left"), (2, ""), (3, "x" * 60)):
        images = {name: example["images"][name] for name in names[:count]}
        yield {**example, "images": images, "prompt": prompt, "seed": count}


@torch.no_grad()
def test_the_compiled_loop_of_pi05_equals_the_model():
    """Two layers, both of which run what was compiled for one."""
    model = tiny.flow(pi05=True)
    observation, noise = tiny.observe(model, [[True] * 3] * 2, (2, 5)), tiny.chunk(model, 2)
    images, prompt, lengths, state = inputs_of(model, observation)
    cache = StaticPrefill(model)(images, prompt, lengths)
    found = compile_graphs(model, STEPS).denoise(cache, lengths, state, noise)[-1]
    expected = model.act(observation, noise, num_steps=STEPS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_file_is_all_that_is_needed_and_equals_the_checkpoint(checkpoint, file):
    expected = piston.load_policy(checkpoint, num_steps=STEPS)
    moved = file.rename(file.parent / "moved.pt2")
    found = piston.load_policy(moved)
    moved.rename(file)
    # Guidance needs derivatives, which a file of compiled code cannot compute.
    assert found.metadata == {**expected.metadata, "rtc": {"kinds": ["trained"], "max_delay": 2}}
    assert found.metadata["reset_pose"] == [0, 1]
    assert found.warm_up() > 0
    observations = list(requests())
    singly = [found.infer(one) for one in observations]
    for answers in (singly, found.infer_batch([*observations, *observations])):
        for ours, one in zip(answers, [*observations, *observations]):
            theirs = expected.infer(one)["actions"]
            np.testing.assert_allclose(ours["actions"], theirs, atol=2e-5, rtol=1e-5)


def test_each_weight_is_stored_once(checkpoint, file):
    graphs = load_pt2(str(file)).aoti_runners
    names = [name for graph in graphs.values() for name in graph.get_constant_fqns()]
    model = weights.load_model(checkpoint)
    used = {name for name, _ in model.named_parameters()} - set(model.unused_parameters())
    assert sorted(names) == sorted(f"model.{name}" for name in used)


def test_what_the_graphs_cannot_do_is_an_error(file):
    policy = piston.load_policy(file)
    observation = next(requests())
    chunk = policy.infer(observation)["actions"]
    rtc = {"previous_chunk": chunk, "delay": 1, "execute_horizon": 2}
    with pytest.raises(ValueError, match=r"rtc.kind is 'guided'; this checkpoint can be trained"):
        policy.infer({**observation, "rtc": {**rtc, "kind": "guided"}})
    with pytest.raises(ValueError, match="candidates is 2, but compiled graphs compute one chunk"):
        piston.load_policy(file, candidates=2)


def test_committed_actions_are_continued(checkpoint, file):
    observation = next(requests())
    rtc = {"previous_chunk": np.full((4, 14), 0.3), "delay": 2, "execute_horizon": 2}
    found, expected = (
        policy.infer({**observation, "rtc": rtc})
        for policy in (piston.load_policy(file), piston.load_policy(checkpoint, num_steps=STEPS))
    )
    np.testing.assert_allclose(found["actions"], expected["actions"], atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(found["actions"][:2], 0.3, atol=1e-5)
    assert found["uncertainty"]["accel"] == pytest.approx(expected["uncertainty"]["accel"], 1e-3)


def test_options_that_the_file_has_already(file):
    with pytest.raises(ValueError, match="compiled for 2 denoising steps, not 4"):
        piston.load_policy(file, num_steps=4)
    with pytest.raises(ValueError, match="leave out --preset, --dtype and --compile"):
        piston.load_policy(file, dtype="bfloat16")
    with pytest.raises(ValueError, match="There is no robot 'cart' here"):
        piston.load_policy(file, robot="cart")


def test_other_machines_are_refused_before_anything_is_loaded(file, tmp_path):
    with zipfile.ZipFile(file) as archive:
        (place,) = (name for name in archive.namelist() if name.endswith("extra/config.json"))
        described = json.loads(archive.read(place))
    made = described["made_with"]
    made |= {"torch": "2.1.0", "flags": [*made["flags"], "warp9"]}
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr(place, json.dumps(described))
    with pytest.raises(ValueError, match=r"torch 2.1.0 \(here .*\); a processor with warp9") as e:
        piston.load_policy(other)
    assert "piston export CHECKPOINT other.pt2" in str(e.value)
