"""A policy: robot's keys in, robot's actions out; one by one, in batches, and from its folder."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import piston
from piston import presets, weights
from piston.config import TRAIN_SECTION, MixtureDataConfig
from piston.inference.candidates import uncertainty
from piston.inference.loading import random_policy
from piston.inference.packing import quantize_for_inference
from piston.inference.policy import Policy
from piston.models.configs import LoRA
from piston.robots.aloha import make_aloha_example
from piston.robots.simple import DROID, LIBERO, UR5, FakeDataConfig
from piston.serialization import to_json
from piston.serving import PreparingPolicy
from piston.transforms import Group
from piston.transforms.normalize import NormStats, write_norm_stats

ROBOTS = {
    "pi0_aloha_sim": (make_aloha_example, 14),
    "pi05_droid": (DROID.example, 8),
    "pi05_libero": (LIBERO.example, 7),
    "pi0_ur5": (UR5.example, 7),
}


@pytest.fixture(scope="module")
def aloha():
    torch.manual_seed(0)
    return random_policy("pi0_aloha_sim")


@pytest.mark.parametrize("preset", ROBOTS)
def test_every_robot_gets_its_own_actions(preset):
    make_example, dim = ROBOTS[preset]
    torch.manual_seed(0)
    result = random_policy(preset).infer(make_example())
    assert result["actions"].shape == (presets.get(preset).model.action_horizon, dim)
    assert np.isfinite(result["actions"]).all()
    assert result["policy_timing"]["infer_ms"] > 0


def test_the_same_seed_or_noise_gives_the_same_actions(aloha):
    example = make_aloha_example()
    first = aloha.infer(example, seed=3)["actions"]
    assert np.array_equal(first, aloha.infer(example, seed=3)["actions"])
    assert not np.allclose(first, aloha.infer(example, seed=4)["actions"])
    assert not np.allclose(aloha.infer(example)["actions"], aloha.infer(example)["actions"])
    noise = np.random.default_rng(0).standard_normal((50, 32), np.float32)
    once, twice = (aloha.infer(example, noise=noise)["actions"] for _ in range(2))
    assert np.array_equal(once, twice)


def test_noise_of_another_shape_is_refused(aloha):
    with pytest.raises(ValueError, match=r"of shape \(50, 14\); expected \(50, 32\)"):
        aloha.infer(make_aloha_example(), noise=np.zeros((50, 14)))


def _unchecked_inputs(data):
    """Inputs of a user's robot that validate nothing."""
    state = np.asarray(data["joints"])
    actions = {key: data[key] for key in data if key == "actions"}
    return {"image": {}, "image_mask": {}, "state": state, "prompt": "go", **actions}


@pytest.mark.parametrize("statistics", [True, False], ids=["statistics", "random policy"])
def test_nan_from_a_robot_without_checks_is_refused(aloha, statistics):
    stats = {key: NormStats(np.zeros(3), np.ones(3)) for key in ("state", "actions")}
    pipeline = dataclasses.replace(
        presets.get("pi0_aloha_sim").data.create("assets", aloha.model.config),
        norm_stats=stats if statistics else {},
        data_transforms=Group(inputs=(_unchecked_inputs,)),
    )
    policy = Policy(aloha.model, pipeline)
    assert np.isfinite(policy.infer({"joints": np.zeros(3)})["actions"]).all()
    with pytest.raises(ValueError, match=r"'state' holds NaN or infinity at 1 \(shape \(3,\)\)"):
        policy.infer({"joints": np.array([0, np.nan, 0])})
    with pytest.raises(ValueError, match=r"'actions' holds NaN or infinity at \(0, 0\)"):
        policy.infer({"joints": np.zeros(3), "rtc": _rtc(np.full((40, 3), np.inf))})
    with pytest.raises(ValueError, match="'state' has dtype <U1; expected numbers"):
        policy.infer({"joints": ["a", "b", "c"]})


def _mixed_requests():
    """Different cameras, prompts and noise in one batch, as from different robots."""
    requests = []
    for index, prompt in enumerate(["pick", "pour the water into the cup", "x"]):
        example = make_aloha_example()
        if index == 1:
            del example["images"]["cam_left_wrist"]
        requests.append({**example, "prompt": prompt, "seed": index})
    return requests


def test_a_batch_equals_one_by_one(aloha):
    requests = _mixed_requests()
    together = aloha.infer_batch(requests)
    for request, result in zip(requests, together, strict=True):
        np.testing.assert_allclose(result["actions"], aloha.infer(request)["actions"], atol=1e-5)


def test_prepared_requests_give_the_same_actions(aloha):
    assert isinstance(aloha, PreparingPolicy)
    requests = _mixed_requests()
    prepared = [aloha.prepare(request) for request in requests]
    assert [one.observation for one in prepared] == requests
    results = aloha.infer_batch(prepared)
    for result, expected in zip(results, aloha.infer_batch(requests), strict=True):
        np.testing.assert_array_equal(result["actions"], expected["actions"])
    with pytest.raises(ValueError, match="batch axis"):
        aloha.prepare({**requests[0], "state": np.zeros((2, 14))})


def _rtc(chunk, delay=5):
    return {"previous_chunk": chunk[20:], "delay": delay, "execute_horizon": 20}


@pytest.fixture(scope="module")
def delta_policy():
    """Delta actions: the old chunk has to be re-based to the new state."""
    torch.manual_seed(0)
    preset = presets.get("pi0_aloha_sim")
    data = dataclasses.replace(preset.data, use_delta_joint_actions=True)
    return random_policy(dataclasses.replace(preset, data=data))


def test_real_time_chunking_continues_the_old_chunk(delta_policy):
    example = make_aloha_example()
    old = delta_policy.infer(example, seed=0)["actions"]
    moved = {**example, "state": example["state"] + 0.3}
    plain = delta_policy.infer(moved, seed=1)["actions"]
    guided = delta_policy.infer({**moved, "rtc": _rtc(old)}, seed=1)["actions"]
    joints = [i for i in range(14) if i not in (6, 13)]

    def distance(chunk):
        return np.abs(chunk[:5, joints] - old[20:25, joints]).mean()

    assert distance(guided) < 0.3 * distance(plain)


def test_real_time_chunking_sees_the_true_state():
    preset = presets.get("tiny_aloha_sim")
    assert preset.data.state_noise > 0
    without = dataclasses.replace(preset, data=dataclasses.replace(preset.data, state_noise=0.0))
    example = make_aloha_example()
    example["images"] = {"cam_high": example["images"]["cam_high"]}
    request = {**example, "rtc": _rtc(np.ones((40, 14), np.float32)), "seed": 3}

    def chunk(config, request):
        torch.manual_seed(0)
        return random_policy(config).infer(request)["actions"]

    found = chunk(preset, request)
    np.testing.assert_array_equal(found, chunk(without, request))
    moved = {**request, "state": request["state"] + np.float32(0.03)}
    assert np.abs(found - chunk(preset, moved)).max() > 1e-4


def test_guided_and_plain_requests_share_a_batch(aloha):
    example = make_aloha_example()
    old = aloha.infer(example, seed=0)["actions"]
    requests = [
        {**example, "seed": 1},
        {**example, "seed": 2, "rtc": _rtc(old)},
        {**example, "seed": 3, "rtc": _rtc(old, delay=9)},
    ]
    together = aloha.infer_batch(requests)
    for request, result in zip(requests, together, strict=True):
        np.testing.assert_allclose(result["actions"], aloha.infer(request)["actions"], atol=1e-5)


def _with_delay(stride=1, **changes):
    """A random policy of ALOHA, trained for delays of up to 3 actions; delta actions."""
    torch.manual_seed(0)
    preset = presets.get("pi0_aloha_sim")
    data = dataclasses.replace(preset.data, use_delta_joint_actions=True, action_stride=stride)
    model = dataclasses.replace(preset.model, max_delay=3)
    return random_policy(dataclasses.replace(preset, data=data, model=model), **changes)


@pytest.mark.parametrize("stride", [1, 4])
def test_a_trained_policy_begins_with_the_committed_actions(stride):
    """In the robot's own units, with delta actions, whatever the state is now."""
    policy, example = _with_delay(stride), make_aloha_example()
    # The last committed action is one of the model's; those between two are interpolated.
    longest = 2 * stride + 1
    assert policy.metadata["rtc"] == {"kinds": ["trained", "guided"], "max_delay": longest}
    old = policy.infer(example, seed=0)["actions"]
    moved = {**example, "state": example["state"] + 0.3, "seed": 1}
    for delay in range(1, longest + 1):
        rtc = {"previous_chunk": old[8:], "delay": delay, "execute_horizon": 8}
        found = policy.infer({**moved, "rtc": rtc})["actions"]
        np.testing.assert_allclose(found[:delay], old[8 : 8 + delay], atol=1e-4)
    plain, guided = policy.infer(moved), policy.infer({**moved, "rtc": {**rtc, "kind": "guided"}})
    for other in (plain, guided):
        assert np.abs(other["actions"][:longest] - old[8 : 8 + longest]).max() > 1e-2
    # What comes after them is the model's choice.
    assert np.abs(found[longest] - old[8 + longest]).max() > 1e-4


def test_trained_guided_and_plain_requests_share_a_batch():
    policy, example = _with_delay(), make_aloha_example()
    old = policy.infer(example, seed=0)["actions"]
    requests = [
        {**example, "seed": 1},
        {**example, "seed": 2, "rtc": _rtc(old, delay=3)},
        {**example, "seed": 3, "rtc": {**_rtc(old, delay=9), "kind": "guided"}},
        {**example, "seed": 4, "rtc": _rtc(old, delay=1)},
    ]
    for request, result in zip(requests, policy.infer_batch(requests), strict=True):
        np.testing.assert_allclose(result["actions"], policy.infer(request)["actions"], atol=1e-4)


def test_delays_that_were_not_trained_are_refused_with_the_number(aloha):
    example, old = make_aloha_example(), np.zeros((50, 14), np.float32)
    with pytest.raises(ValueError, match=r"rtc\.delay is 4 .*at most 3 \(--max-delay 3"):
        _with_delay().infer({**example, "rtc": _rtc(old, delay=4)})
    assert aloha.metadata["rtc"] == {"kinds": ["guided"]}
    with pytest.raises(ValueError, match=r"rtc\.kind is 'trained'.*guided.*--max-delay"):
        aloha.infer({**example, "rtc": {**_rtc(old), "kind": "trained"}})
    with pytest.raises(ValueError, match=r"rtc\.kind is 'other'"):
        aloha.infer({**example, "rtc": {**_rtc(old), "kind": "other"}})
    assert random_policy("pi0_fast_libero").metadata["rtc"] == {"kinds": []}


def test_the_candidate_that_agrees_most_is_sent(aloha):
    example = make_aloha_example()
    random = np.random.default_rng(0)
    noise = random.standard_normal((3, 50, 32), np.float32)
    torch.manual_seed(0)
    policy = random_policy("pi0_aloha_sim", candidates=3)
    policy.model.load_state_dict(aloha.model.state_dict())
    each = [aloha.infer(example, noise=one)["actions"] for one in noise]
    # Two candidates are alike, so one of them is chosen.
    alike = np.stack([noise[0], noise[1], noise[0] + np.float32(1e-3)])
    found = policy.infer(example, noise=alike)
    assert np.abs(found["actions"] - each[0]).max() < 1e-2
    assert np.abs(found["actions"] - each[1]).max() > 1e-2
    # The spread over the candidates of real dimensions, in the model's units.
    apart = policy.infer(example, noise=noise)["uncertainty"]["spread"]
    same = policy.infer(example, noise=np.repeat(noise[:1], 3, axis=0))["uncertainty"]["spread"]
    assert same < 1e-5 < apart
    # With a seed, the first candidate is the only one of a policy without candidates.
    single = aloha.prepare({**example, "seed": 5}).noise
    np.testing.assert_array_equal(policy.prepare({**example, "seed": 5}).noise[0], single)
    with pytest.raises(ValueError, match=r"expected \(3, 50, 32\)"):
        policy.infer(example, noise=noise[0])


def test_uncertainty_is_computed_as_published():
    """accel: how much the velocity changes between steps, relative to the velocity."""
    path = torch.tensor([0.0, 1.0, 3.0, 4.0])[:, None, None, None].expand(4, 2, 1, 1).clone()
    path[:, 1] *= 2
    found = uncertainty(path)
    # Velocities 1, 2, 1: changes 1 and 1, over 4. The same for the second, which is twice as fast.
    assert found["accel"] == pytest.approx(0.5)
    assert found["spread"] == pytest.approx(np.std([4, 8], ddof=1))
    assert uncertainty(path[-2:, :1]) == {}
    still = uncertainty(torch.zeros(4, 1, 1, 1))
    assert still == {"accel": 0}


@pytest.mark.parametrize("name", ["num_steps", "candidates"])
def test_counts_of_a_policy_are_checked(aloha, name):
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
            Policy(aloha.model, aloha.data, **{name: wrong})
    with pytest.raises(ValueError, match=f"{name} is 2, but π0-FAST does not denoise"):
        random_policy("pi0_fast_libero", **{name: 2})


def test_steps_of_a_model_that_has_none_are_refused():
    with pytest.raises(ValueError, match="num_steps is 1, but π0-FAST does not denoise"):
        random_policy("pi0_fast_libero", num_steps=1)


def test_a_distilled_checkpoint_says_how_many_steps_it_wants(aloha):
    torch.manual_seed(0)
    preset = presets.get("pi0_aloha_sim")
    model = dataclasses.replace(preset.model, distilled_steps=2)
    policy = random_policy(dataclasses.replace(preset, model=model, noise_draws=2))
    assert (aloha.num_steps, policy.num_steps) == (10, 2)
    assert Policy(policy.model, policy.data, num_steps=10).num_steps == 10
    assert policy.infer(make_aloha_example())["uncertainty"].keys() == {"accel"}


def test_an_old_chunk_of_the_wrong_shape_is_refused(aloha):
    rtc = {"previous_chunk": np.zeros((51, 14)), "delay": 0, "execute_horizon": 10}
    with pytest.raises(ValueError, match="1 to 50 steps"):
        aloha.infer({**make_aloha_example(), "rtc": rtc})


@pytest.fixture
def checkpoint(tmp_path, aloha):
    """A folder as the trainer writes it."""
    preset = presets.get("pi0_aloha_sim")
    config = dataclasses.replace(
        preset, model=aloha.model.config, exp_name="x", policy_metadata={"reset_pose": [0, 1]}
    )
    folder = tmp_path / "9"
    sections = {TRAIN_SECTION: to_json(config)}
    weights.save_model(aloha.model, aloha.model.config, folder, sections=sections)
    stats = NormStats(np.full(14, 0.5), np.full(14, 2.0), np.zeros(14), np.ones(14))
    asset = folder / "assets" / "lerobot/aloha_sim_transfer_cube_human"
    write_norm_stats(asset, {"state": stats, "actions": stats})
    return folder


def test_a_folder_is_all_that_is_needed(checkpoint, aloha):
    policy = piston.load_policy(checkpoint)
    assert isinstance(policy, Policy)
    assert policy.metadata["reset_pose"] == [0, 1]
    example = make_aloha_example()
    unnormalized = policy.infer(example, seed=0)["actions"]
    assert not np.allclose(unnormalized, aloha.infer(example, seed=0)["actions"])
    assert np.array_equal(
        unnormalized, piston.load_policy(checkpoint).infer(example, seed=0)["actions"]
    )


def test_a_converted_folder_is_all_that_is_needed(checkpoint, tmp_path):
    example = make_aloha_example()
    weights.convert(checkpoint, tmp_path / "converted")
    found, expected = map(piston.load_policy, (tmp_path / "converted", checkpoint))
    assert found.metadata == expected.metadata
    assert found.metadata["reset_pose"] == [0, 1]
    actions = expected.infer(example, seed=0)["actions"]
    assert np.array_equal(found.infer(example, seed=0)["actions"], actions)


@pytest.mark.parametrize("to", ["openpi", "lerobot"])
def test_a_policy_written_for_others_acts_the_same(checkpoint, tmp_path, to):
    example = make_aloha_example()
    expected = piston.load_policy(checkpoint).infer(example, seed=0)["actions"]
    weights.convert(checkpoint, tmp_path / "theirs", to=to)
    with pytest.raises(ValueError, match="Name a preset"):  # they have no place for the robot
        piston.load_policy(tmp_path / "theirs")
    section = json.loads((checkpoint / "config.json").read_text())[TRAIN_SECTION]
    preset = presets.train_config_from_json(section, "config.json")
    found = piston.load_policy(tmp_path / "theirs", preset=preset)
    assert np.array_equal(found.infer(example, seed=0)["actions"], expected)


def test_adapters_are_merged_in_the_converted_folder(tmp_path, aloha):
    sizes = {
        name: dataclasses.replace(getattr(aloha.model.config, name), lora=LoRA(2, 4.0))
        for name in ("vlm", "action_expert")
    }
    model_config = dataclasses.replace(aloha.model.config, **sizes)
    torch.manual_seed(0)
    model = weights.build_model(model_config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # adapters start as zeros
    freeze = ("vlm.*", "action_expert.*", "!*lora*")
    config = dataclasses.replace(
        presets.get("pi0_aloha_sim"), model=model_config, freeze=freeze, exp_name="x"
    )
    sections = {TRAIN_SECTION: to_json(config)}
    weights.save_model(model, model_config, tmp_path / "lora", sections=sections)
    stats = dict.fromkeys(("state", "actions"), NormStats(np.zeros(14), np.ones(14)))
    write_norm_stats(tmp_path / "lora/assets/lerobot/aloha_sim_transfer_cube_human", stats)
    weights.convert(tmp_path / "lora", tmp_path / "merged", merge_lora=True)
    policies = [piston.load_policy(tmp_path / name) for name in ("lora", "merged")]
    assert policies[1].model.config == aloha.model.config
    found, expected = (p.infer(make_aloha_example(), seed=0)["actions"] for p in policies)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_missing_statistics_are_an_error(checkpoint, monkeypatch, tmp_path):
    (checkpoint / "assets/lerobot/aloha_sim_transfer_cube_human/norm_stats.json").unlink()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="Run: piston stats pi0_aloha_sim"):
        piston.load_policy(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [], r"config\.json holds a list; expected a JSON object"),
        (lambda c: {**c, "train": 3}, r"config\.json: train is 3; expected TrainConfig"),
        (
            lambda c: {**c, "train": {**c["train"], "seed": "x"}},
            "seed is 'x'; expected int",
        ),
        (lambda c: {**c, "train": {**c["train"], "colour": 1}}, "does not know: colour"),
        (lambda c: {**c, "train": {"type": "os:system"}}, "'os:system', which is not registered"),
    ],
    ids=["list", "section", "value", "field", "type"],
)
def test_a_malformed_configuration_is_named(checkpoint, change, message):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message) as error:
        piston.load_policy(checkpoint)
    assert str(path) in str(error.value)


def test_a_model_without_a_robot_asks_for_a_preset(tmp_path, aloha):
    weights.save_model(aloha.model, aloha.model.config, tmp_path / "model")
    with pytest.raises(ValueError, match="Name a preset"):
        piston.load_policy(tmp_path / "model")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_fewer_bits_point_the_same_way(checkpoint, dtype):
    example = make_aloha_example()
    exact = piston.load_policy(checkpoint, dtype="float32").infer(example, seed=0)["actions"]
    rough = piston.load_policy(checkpoint, dtype=dtype).infer(example, seed=0)["actions"]
    assert not np.array_equal(exact, rough)
    cosine = (exact * rough).sum() / np.sqrt((exact**2).sum() * (rough**2).sum())
    assert cosine >= 0.995


def test_eight_bits_hold_every_large_matrix(aloha):
    torch.manual_seed(0)
    model = weights.build_model(aloha.model.config)
    quantize_for_inference(model)
    weight = model.vlm.layers[0].mlp.gate.weight
    assert weight.dtype == torch.int8
    large = [n for n, p in model.named_parameters() if p.ndim == 2 and p.numel() > 20_000]
    assert [n for n in large if "embedding" not in n and "suffix" not in n] == []


def test_real_time_chunking_in_eight_bits(checkpoint):
    exact, rough = (piston.load_policy(checkpoint, dtype=dtype) for dtype in ("float32", "int8"))
    example = make_aloha_example()
    old = exact.infer(example, seed=0)["actions"]
    a, b = (p.infer({**example, "rtc": _rtc(old)}, seed=1)["actions"] for p in (exact, rough))
    assert (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()) >= 0.995


@pytest.mark.parametrize(
    ("request_keys", "message"),
    [
        ({"seed": [1]}, "seed is"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"noise": {}}, "noise is"),
        ({"noise": np.full((50, 32), np.nan)}, "'actions' holds NaN"),
        ({"rtc": 5}, "rtc is 5"),
        ({"rtc": {}}, "expected delay, execute_horizon, previous_chunk"),
        ({"rtc": _rtc(np.zeros((50, 14))) | {"delay": None}}, r"rtc\.delay"),
        ({"rtc": _rtc(np.zeros((50, 14)), delay=31)}, "only 30 of the old chunk"),
        ({"state": np.zeros((1, 14), np.float32)}, "of one robot"),
    ],
)
def test_nonsense_in_a_request_is_named(aloha, request_keys, message):
    with pytest.raises(ValueError, match=message):
        aloha.infer({**make_aloha_example(), **request_keys})


WITH_A_ROBOT = [
    name
    for name in presets.names()
    if not isinstance(presets.get(name).data, FakeDataConfig | MixtureDataConfig)
]


@pytest.mark.parametrize("name", WITH_A_ROBOT)
def test_every_preset_with_a_robot_can_be_wired(name):
    robot = UR5 if presets.get(name).data.robot == "your robot (--robot)" else None
    metadata = random_policy(name, robot=robot).metadata
    assert metadata["robot"] == ("UR5" if robot else presets.get(name).data.robot)


def test_a_run_s_folder_names_its_newest_checkpoint(checkpoint):
    with pytest.raises(ValueError, match=r"is a run.*newest is .*/9"):
        piston.load_policy(checkpoint.parent)


@pytest.mark.parametrize("device", ["cuda", "nosuch"])
def test_a_device_that_is_not_there_is_named(checkpoint, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=device):
        piston.load_policy(checkpoint, device=device)


@pytest.mark.parametrize(
    ("seconds", "most", "best"),
    [
        ({1: 1.0, 2: 1.95}, 8, 1),  # no cheaper for each
        ({1: 1.0, 2: 1.6, 4: 2.4, 8: 4.7}, 8, 4),
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 8, 8),
        ({1: 1.0, 2: 1.0, 4: 1.0}, 6, 4),
        ({1: 1.0}, 1, 1),
    ],
)
def test_a_batch_grows_while_requests_become_cheaper(aloha, seconds, most, best, monkeypatch):
    monkeypatch.setattr(aloha.runner, "_seconds_of_batch", seconds.__getitem__)
    assert aloha.best_batch(most) == best


def test_batches_are_measured_with_the_model(aloha):
    seen = []
    hook = aloha.model.vision.register_forward_hook(lambda *inputs: seen.append(len(inputs[1][0])))
    best = aloha.best_batch(2)
    hook.remove()
    assert best in (1, 2)
    assert set(seen) == {3, 6}  # three cameras


def test_a_batch_that_does_not_fit_into_memory_is_not_chosen(aloha, monkeypatch):
    def seconds(size):
        if size > 2:
            raise torch.OutOfMemoryError("no room")
        return 1.0

    monkeypatch.setattr(aloha.runner, "_seconds_of_batch", seconds)
    assert aloha.best_batch(8) == 2


def test_models_that_write_are_batched_without_measuring():
    policy = random_policy("pi0_fast_droid")
    assert policy.best_batch(8) == 8


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_parameters_are_counted_in_whatever_form_they_are(checkpoint, dtype):
    counts = {
        piston.load_policy(checkpoint, dtype=one).num_parameters for one in (dtype, "float32")
    }
    assert len(counts) == 1
