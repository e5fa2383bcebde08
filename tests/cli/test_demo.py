"""`piston demo`: whose folder it deletes, how it fails and goes on, and the short form in full."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import tyro

from piston.cli import demo, main
from piston.cli.demo import PLANS, STATE, DemoPlan, begin
from piston.cli.sim import EvalArguments
from piston.cli.train import parse
from piston.stages import LARGEST_PROCESS, Stages, read_stages

JOB = {"demo": "tested", "seed": 0}
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"
)


def test_a_folder_of_others_is_left_alone(tmp_path, capsys):
    precious = tmp_path / "data" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    assert main(["demo", "--quick", "--out", str(tmp_path)]) == 1
    assert "was not made by `piston demo`" in capsys.readouterr().err
    assert precious.read_text() == "years of work"


def test_only_what_a_demo_made_is_deleted(tmp_path):
    begin(tmp_path, JOB, resume=False)
    for name in ("data/a", "checkpoints/b", "notes/c"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "report.html").touch()
    begin(tmp_path, JOB, resume=False)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {STATE, "notes/c"}


def test_a_state_file_that_is_none_protects_the_folder(tmp_path):
    (tmp_path / STATE).write_text("{}")
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match="no list of stages"):
        begin(tmp_path, JOB, resume=False)
    assert (tmp_path / "data").is_dir()


def test_resuming_needs_the_same_demo(tmp_path):
    stages = Stages(JOB)
    stages.add("record", 1.0, "ok")
    stages.write(tmp_path / STATE)
    assert begin(tmp_path, JOB, resume=True).stages.get("record")
    with pytest.raises(ValueError, match="holds another demo"):
        begin(tmp_path, {**JOB, "seed": 1}, resume=True)
    assert begin(tmp_path, {**JOB, "seed": 1}, resume=False).stages.get("record") is None


def test_another_demo_is_described_by_what_differs(tmp_path, capsys, monkeypatch):
    words = ["demo", "aloha", "--out", str(tmp_path)]
    monkeypatch.setattr(demo, "run_stages", _interrupt)
    assert main([*words, "--quick"]) == 130
    capsys.readouterr()
    assert main([*words, "--resume", "--seed", "3"]) == 1
    error = capsys.readouterr().err
    differences = "seed (0 there, 3 now), episodes (3 there, 150 now), trials, training. Leave out"
    assert differences in error
    assert "{" not in error


def test_a_demo_of_an_earlier_version_is_resumed_unless_something_differs(tmp_path, monkeypatch):
    """Its file describes more of the plan than is compared."""
    words = ["demo", "aloha", "--out", str(tmp_path)]
    monkeypatch.setattr(demo, "run_stages", _interrupt)
    assert main(words) == 130
    state = json.loads((tmp_path / STATE).read_text())
    state["job"] |= {"folder": "elsewhere", "quick_episodes": 99}
    (tmp_path / STATE).write_text(json.dumps(state))
    assert main([*words, "--resume"]) == 130


def _interrupt(*_):
    raise KeyboardInterrupt


def test_after_ctrl_c_the_table_and_the_way_on_are_shown(tmp_path, capsys, monkeypatch):
    def is_stopped(job, *_):
        job.stages.add("record", 7.5, "4 episodes")
        job.stages.add("train", 2.5, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_stages", is_stopped)
    assert main(["demo", "aloha", "--out", str(tmp_path)]) == 130
    told = capsys.readouterr()
    assert re.search(r"│ record │ +7\.5 │ 4 episodes", told.out)
    assert re.search(r"│ train +│ +2\.5 │ not finished", told.out)
    assert re.search(r"│ all +│ +10\.0 │", told.out)
    assert "the same command with --resume goes on" in told.err
    assert "error" not in told.err


def test_seconds_are_those_of_all_attempts(tmp_path, capfd):  # noqa: ARG001
    job = begin(tmp_path, JOB, resume=False)
    for _ in range(2):
        with pytest.raises(CalledProcessError):
            job.do("presets", ("no such preset",), lambda: "never")
        job = begin(tmp_path, JOB, resume=True)
    spent = job.stages.unfinished["presets"]
    assert spent > 0
    job.do("presets", ("debug",), lambda: "shown")
    stages = read_stages(tmp_path / STATE)
    assert stages.get("presets")["seconds"] > spent
    assert stages.unfinished == {}


def test_a_list_of_stages_from_before_is_read(tmp_path):
    old = {"job": JOB, "finished": [], "peak_memory_bytes": 5}
    (tmp_path / STATE).write_text(json.dumps(old))
    assert begin(tmp_path, JOB, resume=True).stages == Stages(JOB, [], 5, LARGEST_PROCESS, {})


def test_memory_is_that_of_the_largest_process_that_has_ended(tmp_path, capfd):  # noqa: ARG001
    together = {"peak_memory_bytes": 5, "peak_memory_of": "all processes together"}
    (tmp_path / STATE).write_text(json.dumps({"job": JOB, "finished": [], **together}))
    job = begin(tmp_path, JOB, resume=True)
    job.do("presets", ("debug",), lambda: "shown")
    assert job.stages.peak_memory_of == LARGEST_PROCESS
    assert job.stages.peak_memory_bytes > 10**7
    assert read_stages(tmp_path / STATE) == job.stages


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_demo_leaves_no_process_behind(
    tmp_path, number, code, wait_until, is_alive, process_tree
):
    """SIGTERM as `kill` sends it, to the demo alone; SIGINT as a terminal does, to all."""
    pytest.importorskip("metaworld", reason="needs the extra `sim`")
    out = tmp_path / "demo"
    # Its demonstrations are shorter than those of the other demo.
    command = [sys.executable, "-m", "piston.cli", "demo", "metaworld", "--out", str(out)]
    send = os.kill if number == signal.SIGTERM else os.killpg
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            log = out / "data" / "meta" / "simulation.jsonl"
            wait_until(
                lambda: process.poll() or (log.exists() and len(log.read_text().split("\n")) > 2)
            )
            below = set(process_tree(process.pid)) - {process.pid}
            assert len(below) >= 3, process.poll()  # `piston record` and its workers
            send(process.pid, number)
            told, error = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == code, error
    wait_until(lambda: not any(map(is_alive, below)))
    assert read_stages(out / STATE).unfinished["record"] > 0
    if number == signal.SIGINT:
        assert re.search(r"│ record │ +\d+\.\d │ not finished", told)
        assert "--resume goes on" in error


def test_a_stage_is_a_command_done_once(tmp_path, capfd):
    job = begin(tmp_path, JOB, resume=False)
    job.do("presets again", ("debug",), lambda: "shown")
    assert "$ piston presets debug" in capfd.readouterr().out
    job.do("presets again", ("no such preset",), lambda: "never")
    stage = read_stages(tmp_path / STATE).get("presets again")
    assert stage["result"] == "shown"
    assert stage["seconds"] > 0


def test_a_failing_stage_tells_its_error_and_code(tmp_path, capfd):
    job = begin(tmp_path, JOB, resume=False)
    with pytest.raises(CalledProcessError) as failure:
        job.do("presets", ("no such preset",), lambda: "never")
    assert (failure.value.cmd, failure.value.returncode) == ("presets", 1)
    assert "No preset is named" in capfd.readouterr().err
    with pytest.raises(CalledProcessError, match="'serve'"), job.serve(tmp_path / "nowhere"):
        pass
    assert read_stages(tmp_path / STATE).finished == []


def test_the_demo_ends_with_the_code_of_its_stage(tmp_path, capfd, monkeypatch):
    plan = dataclasses.replace(PLANS["aloha"], task="no_such_task")
    monkeypatch.setitem(demo.PLANS, "wrong", plan)
    assert main(["demo", "wrong", "--out", str(tmp_path)]) == 1
    error = capfd.readouterr().err
    assert "No environment is named 'no_such_task'" in error
    assert "The stage 'record' failed with exit code 1." in error


def test_a_wrong_name_is_answered_with_the_right_one(capsys):
    assert main(["demo", "alhoa"]) == 1
    assert "Did you mean 'aloha'?" in capsys.readouterr().err


class Spoken:
    """A job that only notes what it is told to do."""

    def __init__(self, out: Path) -> None:
        self.out, self.stages = out, Stages({"demo": "tested"})
        self.commands: dict[str, list[str]] = {}

    def do(self, stage, words, result, *, again=False):  # noqa: ARG002
        self.commands[stage] = [str(word) for word in words]

    @contextmanager
    def serve(self, checkpoint):
        self.commands["serve"] = [str(checkpoint)]
        yield "ws://here"


@pytest.fixture
def spoken(tmp_path) -> Spoken:
    job = Spoken(tmp_path)
    (tmp_path / "checkpoints" / "tiny_aloha_sim" / "demo" / "19").mkdir(parents=True)
    return job


def test_an_opposite_sentence_is_an_evaluation_of_its_own(spoken):
    plan = dataclasses.replace(
        PLANS["aloha"],
        trials={
            "asked": PLANS["aloha"].trials["asked"],
            "opposite": ("other:task", "--seeds", "0..2", "--opposite"),
        },
    )
    demo.run_stages(spoken, plan, seed=7)
    assert list(spoken.commands) == [
        *("record", "stats", "train", "serve", "eval asked", "eval opposite", "report"),
    ]
    asked, opposite = spoken.commands["eval asked"], spoken.commands["eval opposite"]
    assert "--opposite" not in asked
    assert "--opposite" in opposite
    assert asked[0] == "aloha_transfer_cube"
    assert opposite[0] == "other:task"
    assert asked[asked.index("--execute-horizon") + 1] == "96"
    assert spoken.commands["serve"][0].endswith("demo/19")
    report = spoken.commands["report"]
    assert report[report.index("--eval") + 1 :][:2] == [
        str(spoken.out / "eval" / name) for name in ("asked", "opposite")
    ]


def test_nothing_is_served_when_all_is_evaluated(spoken):
    spoken.stages.add("eval", 1.0, "done")
    demo.run_stages(spoken, PLANS["aloha"], seed=0)
    assert "serve" not in spoken.commands


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("quick", [False, True])
def test_plans_fit_their_presets(name, quick, spoken):
    """The command line of every plan means what it says, without running it."""
    plan = PLANS[name].quick() if quick else PLANS[name]
    folder = spoken.out / "checkpoints" / plan.preset / "demo" / "0"
    folder.mkdir(parents=True, exist_ok=True)
    demo.run_stages(spoken, plan, seed=7)
    config = parse(spoken.commands["train"])
    assert config.seed == 7
    assert config.resume
    assert config.checkpoint_dir == folder.parent
    assert config.data.repo_id == str(spoken.out / "data")
    assert parse(spoken.commands["stats"]).assets_dirs == config.assets_dirs
    # What is executed of a chunk is no more than there is.
    steps = config.data_config().steps_read(config.model.action_horizon)
    trials = [words for stage, words in spoken.commands.items() if stage.startswith("eval")]
    assert len(trials) == len(plan.trials)
    for words in trials:
        arguments = tyro.cli(EvalArguments, args=words)
        assert arguments.execute_horizon <= steps
        assert arguments.video
        if quick:
            assert arguments.episodes == 4


def test_the_short_form_is_short():
    plan = DemoPlan("t", "p", 100, {"a": ("--seeds", "0..99")}, training=("--batch-size", "99"))
    short = plan.quick()
    assert short.episodes < 10
    assert short.trials == {"a": ("--seeds", "0..99", "--episodes", "4")}
    assert short.training[:2] == ("--batch-size", "99")


@pytest.mark.slow
def test_the_short_form_from_end_to_end(tmp_path, capfd):
    pytest.importorskip("gym_aloha", reason="needs the extra `sim`")
    out = tmp_path / "demo"
    assert main(["demo", "aloha", "--quick", "--out", str(out)]) == 0
    told = capfd.readouterr().out
    for stage in ("record", "stats", "train", "serve", "eval", "report"):
        assert re.search(rf"│ {stage} +│ +\d+\.\d │", told), stage
    assert re.search(r"success: \d/4 = \d+%", told)
    assert re.search(r"peak memory of the largest process: \d\.\d\d GB", told)
    page = (out / "report.html").read_text()
    parts = re.findall('<section id="([^"]*)"', page)
    assert parts == [
        *("success-per-seed", "videos", "training", "data-set", "chunks-and-what-was-executed"),
        *("why-it-does-that", "action-chunk", "denoising", "transforms", "timings"),
        "how-it-was-started",
    ]
    results = json.loads((out / "eval/asked/results.json").read_text())
    assert f"({out.resolve()}/checkpoints/tiny_aloha_sim/demo/" in results["policy"]
    assert (out / "animation.webp").stat().st_size < 1_000_000
    assert page.count("<video") == 3
    served = read_stages(out / STATE).get("serve")["result"]
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", int(served.rpartition(":")[2]))) != 0

    (out / "report.html").unlink()
    before = read_stages(out / STATE)
    assert main(["demo", "aloha", "--quick", "--out", str(out), "--resume"]) == 0
    assert "$ piston train" not in capfd.readouterr().out
    assert (out / "report.html").read_text().count("<section") == len(parts)
    assert read_stages(out / STATE).get("eval") == before.get("eval")


def test_the_server_is_stopped_when_an_evaluation_fails(tmp_path, monkeypatch):
    """Whatever goes wrong while it serves."""
    job = begin(tmp_path, JOB, resume=False)
    ended = []

    class Process:
        returncode = None

        def poll(self):
            return None

        def terminate(self):
            ended.append("told")

        def wait(self, timeout=None):  # noqa: ARG002
            ended.append("waited for")

    monkeypatch.setattr(demo, "Popen", lambda *_, **__: Process())
    monkeypatch.setattr(demo, "_is_healthy", lambda _: True)
    with pytest.raises(CalledProcessError), job.serve(tmp_path):
        raise CalledProcessError(3, "eval")
    assert ended == ["told", "waited for"]


def test_the_short_form_says_what_not_to_expect(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_stages", stop)
    assert main(["demo", "--quick", "--out", str(tmp_path / "out")]) == 130
    assert "No success is to be expected" in " ".join(capsys.readouterr().out.split())


def test_what_the_server_logs_does_not_disturb_a_progress_bar(tmp_path, capfd):
    job = begin(tmp_path, JOB, resume=False)
    with pytest.raises(CalledProcessError, match="'serve'"), job.serve(tmp_path / "nowhere"):
        pass
    assert "nowhere" in (tmp_path / demo.LOG).read_text()
    assert "error: " in capfd.readouterr().err  # shown where the server does not start
