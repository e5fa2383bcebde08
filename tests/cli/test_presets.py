"""`piston presets`, as a person runs it."""

from piston import presets
from piston.cli import main


def test_the_table_has_every_preset_and_what_it_is_for(capsys):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in presets.names():
        (row,) = [line for line in lines if f" {name} " in line]
        assert presets.purpose(presets.get(name)) in row


def test_one_preset_shows_its_chain_in_order(capsys):
    assert main(["presets", "pi0_aloha"]) == 0
    shown = capsys.readouterr().out
    order = [
        "RepackTransform", "AlohaInputs", "DeltaActions", "Normalize", "InjectDefaultPrompt",
        "ResizeImages", "FillCameras", "TokenizePrompt", "PadStatesAndActions",
        "Unnormalize", "AbsoluteActions", "AlohaOutputs",
    ]  # fmt: skip
    chain = shown[shown.index("transform chain") :]
    places = [chain.index(f" {name}") for name in order]
    assert places == sorted(places)
    assert "vlm = gemma_2b" in shown


def test_an_unknown_preset_ends_in_one_line(capsys):
    assert main(["presets", "pi0_liber"]) == 1
    error = capsys.readouterr().err
    assert "Did you mean 'pi0_libero'" in error
    assert "Traceback" not in error


def test_an_unknown_verb_suggests_the_nearest(capsys):
    assert main(["preset"]) == 2
    assert "Did you mean 'presets'" in capsys.readouterr().err


def test_a_preset_for_a_robot_of_ones_own_says_what_it_needs(capsys, tmp_path):
    assert main(["presets", "tiny_robot"]) == 0
    assert "describe it with --robot FILE" in capsys.readouterr().out
    file = tmp_path / "arm.toml"
    file.write_text('name = "arm"\ncameras = {}\n[state]\nstate = 3\n[actions]\naction = 2\n')
    assert main(["presets", "pi0_aloha", "--robot", str(file)]) == 0
    assert "RobotInputs(name='arm'" in capsys.readouterr().out
