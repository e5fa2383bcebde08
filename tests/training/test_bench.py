from piston.cli import main


def test_the_benchmark_runs_through_the_loop(capsys, monkeypatch):
    monkeypatch.setenv("PISTON_HOME", "unused")  # is set by the benchmark; put back afterwards
    words = ["bench", "train", "dummy", "--steps", "1", "--draws", "1", "--num-workers", "0"]
    assert main([*words, "--batch-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "1 draw per prefix" in shown
    assert "gradient checkpointing" in shown
    assert "waiting for data" in shown
