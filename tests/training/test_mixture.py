"""One model learns from two robots, one with subtasks, and from pictures with questions."""

import dataclasses
import json
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.testing import assert_close

from piston import weights
from piston.cli import main
from piston.cli.train import parse
from piston.config import AssetsConfig, MixtureDataConfig
from piston.data.mixture import mixed
from piston.data.pipeline import open_sources, open_training_data
from piston.data.problems import leave_out, leave_out_any
from piston.inference import load_policies
from piston.models.configs import LoRA
from piston.presets import train_config_from_json
from piston.serialization import to_json
from piston.tokenizers.text import BytesTokenizer
from piston.training import loop
from piston.training.checkpoint import saved_steps
from piston.training.distributed import Processes
from piston.training.loop import train_loop
from piston.training.run import read_statistics
from piston.training.step import Trainer
from piston.training.validation import validate
from piston.transforms.normalize import read_norm_stats

from .mixing import FRAMES, QUESTIONS, SUBTASKS, mixture, options, record_all, write_pictures
from .running import assert_same_run, command, losses, metrics, started, state, wait_for
from .tiny_presets import FAST, GEMMA, MIXED, MIXTURE

# Two epochs: an episode of each robot is held out, which leaves 16 + 16 frames and 4 questions.
STEPS = 18
DIMS = {0: 7, 1: 4, 2: 0}
ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    record_all(folder)
    assert main(["stats", "tiny_mixture", *options(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run that is never cut, and its batches."""
    batches = []
    original = loop.Trainer.step

    def step(self, batch, number, *more):
        batches.append(batch)
        return original(self, batch, number, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "step", step)
        config = mixture(
            data, tmp_path_factory.mktemp("runs"), num_train_steps=STEPS, save_interval=5
        )
        return train_loop(config), batches


@pytest.fixture(scope="module")
def batch(trained):
    """Samples of all sets together."""
    batches = trained[1]
    sets = torch.cat([one["set_index"] for one in batches])
    chosen = [int((sets == number).nonzero()[place, 0]) for number in DIMS for place in (0, 1)]

    def take(parts):
        if isinstance(parts[0], dict):
            return {key: take([part[key] for part in parts]) for key in parts[0]}
        return torch.cat(parts)[chosen]

    return take(batches)


def trainer_of(batch, **changes):
    config = dataclasses.replace(
        MIXTURE, augmentation=False, gradient_accumulation=1, batch_size=len(batch["state"])
    )
    config = dataclasses.replace(config, **changes)
    torch.manual_seed(0)
    return Trainer(config, weights.build_model(config.model), ALONE)


def measure(trainer, batch):
    """The losses of one step, and the gradients by name."""
    result = trainer.read([trainer.step(batch, 0)])[0]
    gradients = {n: p.grad for n, p in trainer.parameters.items() if p.grad is not None}
    return result, gradients


def test_every_entry_has_its_share_of_the_samples(trained):
    drawn = Counter(number for one in trained[1] for number in one["set_index"].tolist())
    assert drawn == {0: 36, 1: 18, 2: 18}


def test_what_a_sample_of_each_entry_holds(trained):
    """Actions of the robot's own dimensions; text where there is a label; FAST codes of actions."""
    text = BytesTokenizer()
    seen = Counter()
    for one in trained[1]:
        for row, number in enumerate(one["set_index"].tolist()):
            dim = DIMS[number]
            assert one["action_dims"][row] == dim
            assert not one["actions"][row, :, dim:].any()
            tokens, learned = one["tokenized_prompt"][row], one["token_loss_mask"][row]
            assert torch.equal(learned, one["token_ar_mask"][row].bool())
            prompt = text.decode(tokens[one["tokenized_prompt_mask"][row] & ~learned].tolist())
            shown = learned & ~one["token_hidden_mask"][row]
            said = text.decode(tokens[shown].tolist())
            hidden = text.decode(tokens[one["token_hidden_mask"][row]].tolist())
            if number == 0:
                assert prompt.startswith("Task: put the cup on plate ")
                assert prompt.endswith(";\nAction: ")
                assert (said, hidden[-1:]) == ("", "|")
            elif number == 1:
                assert prompt.startswith("Task: open the drawer, State: ")
                step, labelled = int(one["frame_index"][row]), int(one["episode_index"][row]) < 2
                label = SUBTASKS[step] if labelled else ""
                assert prompt.endswith(";\nSubtask: " if label else ";\nAction: ")
                assert said == label
                assert hidden.startswith("Action: ") == bool(label)
            else:
                question, answer = QUESTIONS[int(one["index"][row])]
                assert (prompt, said) == (f"Question: {question}\nAnswer: ", answer)
                assert hidden == ""
                assert one["action_is_pad"][row].all()
                assert not one["state"][row].any()
                masks = {name: bool(mask[row]) for name, mask in one["image_mask"].items()}
                assert masks == {"base_0_rgb": True, "left_wrist_0_rgb": False}
            seen[number, bool(said)] += 1
    assert seen.keys() == {(0, False), (1, False), (1, True), (2, True)}


def test_padding_of_every_entry_is_out_of_loss_and_gradient(batch):
    """Other targets there, with the same noisy actions, change nothing."""
    padded = batch["action_is_pad"][..., None].expand(-1, -1, 8).clone()
    for row, number in enumerate(batch["set_index"].tolist()):
        padded[row, :, DIMS[number] :] = True
    assert 0 < padded[batch["set_index"] < 2].float().mean() < 1
    found = []
    for where in (torch.zeros_like(padded), padded, ~padded):
        trainer = trainer_of(batch, noise_draws=1)
        draws = trainer._draw(len(batch["state"]), 0)
        t, shift = draws["time"][..., None, None], where[:, None] * 0.7
        trainer._draw = lambda *_, d={**draws, "noise": draws["noise"] - shift * (1 - t) / t}: d
        found.append(measure(trainer, {**batch, "actions": batch["actions"] + shift[:, 0]}))
    (one, expected), (same, gradients), (other, _) = found
    assert same.losses["velocity"] == pytest.approx(one.losses["velocity"], rel=1e-5)
    assert other.losses["velocity"] != pytest.approx(one.losses["velocity"], rel=1e-2)
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], atol=1e-5, rtol=1e-3)
    # No robot has the eighth dimension.
    assert not gradients["suffix.action_out.weight"][7:].any()
    assert gradients["suffix.action_out.weight"][:7].any(1).all()


def test_the_flow_loss_does_not_train_the_vlm(batch):
    trainer = trainer_of(batch)
    _, expected = measure(trainer, batch)
    _, without_text = measure(
        trainer_of(batch), {**batch, "token_loss_mask": torch.zeros_like(batch["token_loss_mask"])}
    )
    for name, gradient in without_text.items():
        is_vlm = name.startswith(("vlm.", "vision."))
        assert gradient.any().item() != is_vlm or not expected[name].any(), name


def test_parts_of_a_batch_and_several_draws(batch):
    whole, gradients = measure(trainer_of(batch), batch)
    parts, same = measure(trainer_of(batch, gradient_accumulation=6), batch)
    for name, loss in whole.losses.items():
        assert parts.losses[name] == pytest.approx(loss, rel=1e-5)
    for name, gradient in same.items():
        assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-3)
    one, _ = measure(trainer_of(batch, noise_draws=1), batch)
    assert one.losses["tokens"] == pytest.approx(whole.losses["tokens"], rel=1e-5)
    assert one.losses["velocity"] != whole.losses["velocity"]


def test_adapters_learn_from_both_losses(batch):
    sizes = {
        name: dataclasses.replace(size, lora=LoRA(rank=2, alpha=2.0))
        for name, size in (("vlm", GEMMA), ("action_expert", MIXED.action_expert))
    }
    # π0: before its norms have learned, π0.5's expert passes nothing through its layers.
    model = dataclasses.replace(MIXED, **sizes, pi05=False)
    freeze = ("vision.*", "vlm.*", "action_expert.*", "suffix.*", "!*lora*")
    trainer = trainer_of(batch, model=model, freeze=freeze)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    for step in range(2):
        trainer.step(batch, step)
    moved = {n for n, v in trainer.model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved == {*trainer.parameters}
    assert {name.partition(".")[0] for name in moved} == {"vlm", "action_expert"}
    assert {*trainer.ema.mean} == moved


def test_one_checkpoint_has_all_that_every_robot_needs(data, trained):
    last, _ = trained
    folders = {path.parent.name for path in last.glob("assets/*/norm_stats.json")}
    assert folders == {"cups", "drawers"}
    for name, (state_dim, dim) in {"cups": (8, 7), "drawers": (4, 4)}.items():
        stats = read_norm_stats(last / "assets" / name)
        assert stats == read_norm_stats(data / "assets" / "tiny_mixture" / name)
        assert (stats["state"].dim, stats["actions"].dim) == (state_dim, dim)
    shutil.copytree(last, data / "moved")
    policies = load_policies(data / "moved")
    assert {name: one.metadata["control_hz"] for name, one in policies.items()} == {
        "cups": 10, "drawers": 20
    }  # fmt: skip
    limits = {name: len(one.metadata["action_limits"]["low"]) for name, one in policies.items()}
    assert limits == {"cups": 7, "drawers": 4}


def test_metrics_have_both_losses_and_the_validation(trained):
    lines = metrics(trained[0].parent)
    for line in lines:
        if "loss" in line:
            assert line["loss"] == pytest.approx(line["loss/velocity"] + line["loss/tokens"])
    validated = [line for line in lines if "validation/loss" in line]
    assert [line["step"] for line in validated] == [9, 17]
    for line in validated:
        errors = line["validation/action_error_per_dim"]
        assert list(errors) == list("0123456")  # of the robot with more of them
        assert line["validation/action_error"] == pytest.approx(np.mean([*errors.values()]))
        assert np.isfinite(line["validation/loss"])
    saved = state(trained[0])
    assert any(name.startswith("optimizer/vlm.layers.1.mlp") for name in saved)  # text trains it


def test_validation_may_see_no_frame_of_the_robot_with_more_dimensions(data, batch, tmp_path):
    config = mixture(data, tmp_path)
    drawers = open_training_data(read_statistics(config)[1], config.model, episodes=[2])
    found = validate(trainer_of(batch), drawers, names=list("0123456"))
    errors = found["validation/action_error_per_dim"]
    assert list(errors) == list("0123")
    assert found["validation/action_error"] == pytest.approx(np.mean([*errors.values()]))


def test_what_is_saved_in_the_background_does_not_change(data, tmp_path, monkeypatch):
    """Later steps must not change the sums of losses that a checkpoint is about to hold."""
    saved = []
    original = loop.CheckpointWriter.save

    def save(self, trainer, step, progress, **how):
        saved.append((json.dumps(progress), progress))
        original(self, trainer, step, progress, **how)

    monkeypatch.setattr(loop.CheckpointWriter, "save", save)
    train_loop(mixture(data, tmp_path, num_train_steps=6, save_interval=2, log_interval=3))
    assert len(saved) == 3
    assert [json.dumps(progress) for _, progress in saved] == [text for text, _ in saved]


def test_a_killed_run_goes_on_as_if_it_had_not_been(data, trained, tmp_path):
    """With another number of processes that read data."""
    run = tmp_path / "tiny_mixture" / "run"
    words = (*options(data), f"--num-train-steps={STEPS}", "--save-interval=5", "--num-workers=1")
    with started(command(tmp_path, *words, preset="tiny_mixture")) as process:
        wait_for(lambda: len(losses(run)) > 7 and saved_steps(run), process)
        process.kill()
    assert saved_steps(run) == [5]
    assert len(losses(run)) < STEPS
    train_loop(mixture(data, tmp_path, num_train_steps=STEPS, save_interval=5, resume=True))
    assert_same_run(run, trained[0].parent, STEPS - 1)


def test_statistics_are_computed_robot_by_robot(data, tmp_path, capsys):
    words = [*options(data)[:-1], f"--assets-base-dir={tmp_path}"]
    assert main(["stats", "tiny_mixture", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.index(" cups ") < shown.index("cups/norm_stats.json") < shown.index(" drawers ")
    assert shown.count("16 of 16 frames") == 2  # an episode of each is held out
    assert "pictures" not in shown
    for name in ("cups", "drawers"):
        assert read_norm_stats(tmp_path / "tiny_mixture" / name) == read_norm_stats(
            data / "assets" / "tiny_mixture" / name
        )


def test_frames_are_cached_with_their_labels(data, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    cached = train_loop(
        mixture(data, tmp_path, num_train_steps=STEPS, save_interval=5, cache_frames=True)
    )
    assert_same_run(cached.parent, trained[0].parent, STEPS - 1)
    assert {path.name for path in (tmp_path / "home" / "frames").iterdir()} == {"cups", "drawers"}


def test_the_questions_of_a_robots_set_are_an_entry_too(data, tmp_path, caplog):
    """Listed before the robot itself; what is held out is so for both."""
    caplog.set_level("INFO", logger="piston")
    config = mixture(data, tmp_path)
    robots = config.data.robots
    asked = dataclasses.replace(robots["pictures"], repo_id=robots["drawers"].repo_id)
    config = dataclasses.replace(
        config,
        data=MixtureDataConfig({"questions": asked, "drawers": robots["drawers"]}),
        num_train_steps=2,
    )
    last = train_loop(config)
    assert any("validation/loss" in line for line in metrics(last.parent))
    (line,) = [record.getMessage() for record in caplog.records if "questions," in record.message]
    assert line.startswith(f"Set 0: questions, {data / 'drawers'}, 2 episodes, ")
    assert "held out" not in line
    assert f"Set 1: drawers, {data / 'drawers'}, 2 episodes, 16 samples" in caplog.text


def test_an_entry_may_have_several_sets():
    words = ["--data.cups.extra-datasets", "a/b", "c/d#!7", "--data.cups.set-shares", "2", "1", "1"]
    config = parse(["tiny_mixture", *words])
    sets = config.pipelines()
    assert [(one.entry, one.set_index, one.repo_id, one.is_extra) for one in sets] == [
        ("cups", 0, "cups", False),
        ("cups", 1, "a/b", True),
        ("cups", 2, "c/d", True),
        ("drawers", 3, "drawers", False),
        ("pictures", 4, "pictures", False),
    ]
    # Of the mixture's 4 shares, cups have 2, which its sets divide as 2 : 1 : 1.
    samples = [range(10), range(20), range(5), range(100), range(1)]
    assert mixed(samples, sets).weights == pytest.approx((1 / 4, 1 / 8, 1 / 8, 1 / 4, 1 / 4))
    assert [leave_out(one, [3]) for one in sets] == [
        "--data.cups.episodes '!3'",
        "'a/b#!3' in --data.cups.extra-datasets",
        "'c/d#!7,!3' in --data.cups.extra-datasets",
        "--data.drawers.episodes '!3'",
        "--data.pictures.episodes '!3'",
    ]
    assert "--data.cups.episodes '!N', or of another set" in leave_out_any(sets)


def test_without_shares_every_sample_counts_the_same():
    none = {name: dataclasses.replace(one, share=None) for name, one in MIXTURE.data.robots.items()}
    sets = dataclasses.replace(MIXTURE, data=MixtureDataConfig(none)).pipelines()
    assert mixed([range(30), range(60), range(10)], sets).weights == pytest.approx((0.3, 0.6, 0.1))


def test_a_mixture_is_read_back_from_its_json():
    assert train_config_from_json(to_json(MIXTURE), "test") == MIXTURE


def _fails(config, *parts):
    """Training stops before it begins, with all of these in the message or its notes."""
    with pytest.raises((ValueError, OSError, KeyError)) as found:
        train_loop(config)
    text = "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])
    for part in parts:
        assert part in text
    assert not (config.checkpoint_dir / "metrics.jsonl").exists()


class TestErrorsNameTheEntry:
    def test_statistics_are_missing(self, data, tmp_path):
        shutil.copytree(data / "assets", tmp_path / "assets")
        shutil.rmtree(tmp_path / "assets" / "tiny_mixture" / "drawers")
        config = mixture(data, tmp_path, assets_base_dir=str(tmp_path / "assets"))
        _fails(
            config,
            "drawers (--data.drawers.assets.asset-id drawers)",
            f"piston stats tiny_mixture --data.cups.repo-id {data / 'cups'}",
            f"--assets-base-dir {tmp_path / 'assets'}",
        )

    @pytest.mark.parametrize("command", ["train", "stats"])
    def test_a_label_is_outside_its_episode(self, data, tmp_path, command, capsys):
        spoilt = tmp_path / "drawers"
        shutil.copytree(data / "drawers", spoilt)
        path = spoilt / "data/chunk-000/file-001.parquet"
        table = pq.read_table(path)
        late = {"role": "assistant", "content": "push", "style": "subtask", "timestamp": 0.5}
        place = table.column_names.index("language_persistent")
        cells = pa.array([[{**late, "camera": None, "tool_calls": None}]] * FRAMES)
        pq.write_table(table.set_column(place, "language_persistent", cells), path)
        words = [*options(data), f"--data.drawers.repo-id={spoilt}"]
        words += [f"--assets-base-dir={tmp_path}"] if command == "stats" else []
        words += [f"--checkpoint-base-dir={tmp_path}"] if command == "train" else []
        assert main([command, "tiny_mixture", *words]) == 1
        shown = capsys.readouterr().err
        assert "'push' begins at 0.5 s, but the episode lasts from 0 to 0.4 s" in shown
        assert f"in {spoilt} (drawers)" in shown
        assert "To leave the episode out: --data.drawers.episodes '!1'" in shown

    def test_a_subtask_is_too_long(self, data, tmp_path):
        model = dataclasses.replace(MIXED, max_text_len=5)
        _fails(
            mixture(data, tmp_path, model=model),
            "The subtask 'reach' has 5 tokens and an end token; the model keeps 5",
            f"in {data / 'drawers'} (drawers)",
        )

    def test_an_answer_is_too_long(self, data, tmp_path):
        write_pictures(tmp_path / "long", [("What?", "a"), ("And?", "b" * 16)])
        config = mixture(data, tmp_path, f"--data.pictures.repo-id={tmp_path / 'long'}")
        _fails(config, "The answer 'bbbbbbbbbbbbbbbb' has 16", f"in {tmp_path / 'long'} (pictures)")

    def test_a_further_set_may_have_no_labels(self, data, tmp_path, caplog):
        """The third episode of the drawers has none."""
        config = mixture(data, tmp_path, f"--data.drawers.extra-datasets={data / 'drawers'}#2")
        opened = open_sources(config.pipelines(), config.model)
        assert [bool(one.subtasks) for one in opened[1:3]] == [True, False]
        assert f"{data / 'drawers'} (drawers): no labels of subtasks" in caplog.text

    def test_there_are_no_labels(self, data, tmp_path):
        _fails(
            mixture(data, tmp_path, "--data.cups.subtasks"),
            f"{data / 'cups'} (cups): there are no labels of subtasks",
            "set --data.cups.no-subtasks",
        )
        no_questions = f"--data.pictures.repo-id={data / 'cups'}"
        _fails(
            mixture(data, tmp_path, no_questions),
            "has no questions: expected rows of style vqa",
            f"in {data / 'cups'} (pictures)",
        )

    def test_there_are_no_data(self, data, tmp_path):
        for name in ("drawers", "pictures"):
            config = mixture(data, tmp_path, f"--data.{name}.repo-id={tmp_path / 'none'}")
            assets = AssetsConfig(asset_id=name)  # else named by the folder
            robots = dict(config.data.robots)
            robots[name] = dataclasses.replace(robots[name], assets=assets)
            config = dataclasses.replace(config, data=MixtureDataConfig(robots))
            _fails(config, f"There is no data set {tmp_path / 'none'}", f"in the data of {name}")

    def test_a_picture_is_damaged(self, data, tmp_path):
        root = tmp_path / "torn"
        write_pictures(root)
        (root / "2.png").write_bytes(b"no picture")
        with pytest.raises(ValueError, match="row 2: the image") as found:
            train_loop(mixture(data, tmp_path, f"--data.pictures.repo-id={root}"))
        assert f"in {root} (pictures)" in found.value.__notes__

    def test_all_questions_are_held_out(self, data, tmp_path):
        one = f"--data.pictures.repo-id={data / 'drawers'}"
        # The one episode without labels is all that is left.
        with pytest.raises(ValueError, match=r"\(pictures\) .* have no questions") as found:
            train_loop(mixture(data, tmp_path, one, validation_episodes=2, seed=_seed_of(data)))
        assert "--data.pictures.episodes" in str(found.value)

    @pytest.mark.parametrize(
        ("word", "message"),
        [
            ("--data.cups.share=None", "--data.drawers.share is 1, but cups has no share"),
            ("--data.cups.share=0", "--data.cups.share is 0.0; expected a number above 0"),
            ("--data.cups.share=nan", "--data.cups.share is nan; expected a number above 0"),
            ("--no-mask-padded-dims", "mixes cups, drawers, pictures, which need not have the"),
        ],
    )
    def test_shares_do_not_fit(self, data, tmp_path, word, message, capsys):
        words = [*options(data), f"--checkpoint-base-dir={tmp_path}", word]
        assert main(["train", "tiny_mixture", *words]) != 0
        assert message in " ".join(capsys.readouterr().err.split())

    def test_sets_of_an_entry_have_no_share(self, data, tmp_path):
        words = (f"--data.cups.extra-datasets={data / 'cups'}", "--data.cups.set-shares=1")
        _fails(mixture(data, tmp_path, *words), "set-shares has 1 of 2", "in the data of cups")

    def test_two_robots_have_one_name_for_their_statistics(self, data, tmp_path):
        word = "--data.drawers.assets.asset-id=cups"
        _fails(
            mixture(data, tmp_path, word),
            "The statistics of cups and drawers would both be named 'cups'",
            "Set --data.drawers.assets.asset-id",
        )

    def test_a_model_without_text(self, data, tmp_path):
        config = mixture(data, tmp_path, model=dataclasses.replace(MIXED, targets=("fast",)))
        _fails(config, "a policy that writes its subtask", "in the data of drawers")
        robots = {n: r for n, r in config.data.robots.items() if n != "drawers"}
        config = dataclasses.replace(config, data=MixtureDataConfig(robots))
        _fails(config, "name text in --model.targets", "in the data of pictures")

    def test_a_model_of_one_robot_only(self):
        with pytest.raises(ValueError, match="π0-FAST writes the actions of one robot only"):
            dataclasses.replace(
                MIXTURE, model=FAST, noise_draws=1, mask_padded_dims=False, mask_padded_steps=False
            )


def _seed_of(data):
    """A seed that holds out both labelled episodes of the drawers."""
    from piston.data.dataset import open_dataset
    from piston.data.mixture import split_episodes

    episodes = open_dataset(data / "drawers", cameras=()).episodes
    return next(s for s in range(99) if split_episodes(episodes, 2, seed=s)[1] == [0, 1])
