"""Every name of Piston that documentation, examples or docstrings of 0.2.0.dev0 show is importable.

A name that moves keeps its row here, under its old module: `piston.moved` leads to the new one.
"""

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import piston
from piston import moved

# Module: names in it, and attributes of those. A module without names is shown by itself.
PUBLIC = {
    "piston": "__version__ load_policy",
    "piston.assets": "resolve",
    "piston.client": "",
    "piston.config": (
        "AdamW AssetsConfig CosineDecaySchedule DataConfig DataConfigFactory "
        "MixtureDataConfig ModelTransformFactory TrainConfig TrainConfig.weights"
    ),
    "piston.data.aloha_hdf5": "",
    "piston.data.dataset": "LeRobotDataset open_dataset",
    "piston.data.language": "Question",
    "piston.data.metadata": "",
    "piston.data.pipeline": "open_source split_sources",
    "piston.data.problems": "",
    "piston.data.recorder": "Recorder Recorder.add_frame Recorder.save_episode",
    "piston.data.samples": "PromptFromItem",
    "piston.data.statistics": "TransformedColumns compute_statistics",
    "piston.inference": "Policy Policy.infer",
    "piston.inference.loading": "random_policy",
    "piston.inference.policy": "Policy",
    "piston.inspection": "Intervention Occlusion Probe open_loop",
    "piston.inspection.live": "compare",
    "piston.inspection.server": "",
    "piston.logs": "init_logging",
    "piston.models.configs": "GemmaSize LoRA Pi0Config Pi0FASTConfig VisionSize",
    "piston.models.flow": "Pi0.act Pi0.training_losses",
    "piston.models.gemma": "Rope",
    "piston.models.integrator": "integrate",
    "piston.models.masks": "",
    "piston.models.static": "",
    "piston.observation": "Observation stack_samples",
    "piston.presets": "get",
    "piston.robots": "RobotDataConfig RobotInputs RobotInputs.outputs",
    "piston.robots.aloha": (
        "AlohaInputs AlohaOutputs LeRobotAlohaDataConfig make_aloha_example repack_aloha"
    ),
    "piston.robots.description": "DescribedRobotDataConfig",
    "piston.robots.image_text": "ImageTextDataConfig",
    "piston.robots.simple": (
        "DROID DroidDataConfig LIBERO LeRobotDROIDDataConfig LeRobotLiberoDataConfig "
        "RLDSDroidDataConfig"
    ),
    "piston.serialization": "register",
    "piston.serving": "PreparingPolicy run_server running_server",
    "piston.sim": "make_environment make_expert",
    "piston.sim.environment": "Environment",
    "piston.sim.recording": "features record",
    "piston.sim.rollouts": "evaluate",
    "piston.sim.scores": "Rate",
    "piston.training": "",
    "piston.training.loop": "train_loop",
    "piston.transforms": "Group RepackTransform compose name_of",
    "piston.transforms.actions": "AbsoluteActions DeltaActions PadStatesAndActions make_bool_mask",
    "piston.transforms.images": "ResizeImages",
    "piston.transforms.normalize": "NormStats Normalize Unnormalize write_norm_stats",
    "piston.transforms.prompts": "InjectDefaultPrompt TokenizePrompt",
    "piston.weights": "build_model",
    "piston_client": (
        "ActionChunkBroker Agent AsyncChunkBroker Client Environment Hooks Limits "
        "RealTimeBroker Runtime TemporalEnsemble"
    ),
    "piston_client.examples": "example_observation",
}


def resolve(module, dotted=""):
    found = importlib.import_module(module)
    for name in dotted.split(".") if dotted else ():
        fields = getattr(found, "__dataclass_fields__", {})
        found = fields[name] if name in fields else getattr(found, name)
    return found


@pytest.mark.filterwarnings("ignore:piston.*is named .* now:FutureWarning")
@pytest.mark.parametrize("module", PUBLIC)
def test_what_is_shown_can_be_imported(module):
    resolve(module)
    for name in PUBLIC[module].split():
        resolve(module, name)


@pytest.mark.filterwarnings("ignore:piston.*is named .* now:FutureWarning")
@pytest.mark.parametrize("old", moved.MOVED)
def test_each_row_leads_to_its_new_name(old):
    module, _, name = old.partition(":")
    new_module, _, new_name = moved.MOVED[old].partition(":")
    assert moved.new_module(new_module) is None, "the new name has moved as well"
    if not name:
        path = Path(piston.__file__).parents[1] / module.replace(".", "/")
        assert not path.is_dir(), "the old package is still there"
        assert not path.with_suffix(".py").exists(), "the old module is still there"
    assert resolve(module, name) is resolve(new_module, new_name)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Modules before and after some of their names have moved."""
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after, after / "below"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (after / "new.py").write_text("kept = object()\nvalue = object()\n")
    (after / "below" / "deep.py").write_text("value = object()\n")
    (before / "partly.py").write_text(
        "from piston.moved import moved_names\nown = 1\n__getattr__ = moved_names(__name__)\n"
    )
    rows = {
        "before.whole": "after.new",
        "before.package": "after.below",
        "before.partly:value": "after.new:kept",
        "before.gone:value": "after.new:value",
        "before.gone:deep": "after.below.deep:value",
    }
    monkeypatch.syspath_prepend(tmp_path)
    for old, new in rows.items():
        monkeypatch.setitem(moved.MOVED, old, new)
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("before", "after"):
            del sys.modules[name]
    sys.path_importer_cache.pop(str(tmp_path), None)


def messages(program):
    """Run it, and return its warnings with the line of the program that caused each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(program, "<program>", "exec"), {})
    assert all(one.category is FutureWarning for one in caught)
    return [(str(one.message).partition(" now.")[0], one.filename, one.lineno) for one in caught]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            "import before.whole\nimport after.new\nassert before.whole is after.new",
            ["before.whole is named after.new"],
        ),
        (
            "from before.package.deep import value\nfrom after.below import deep\n"
            "assert value is deep.value",
            ["before.package is named after.below"],
        ),
        (
            "from before.partly import own, value\nimport before.partly, after.new\n"
            "assert (own, before.partly.value, value) == (1, after.new.kept, after.new.kept)",
            ["before.partly.value is named after.new.kept"],
        ),
        (
            "from before.gone import value, deep\nfrom after import new\nassert value is new.value",
            [
                "before.gone.value is named after.new.value",
                "before.gone.deep is named after.below.deep.value",
            ],
        ),
    ],
    ids=["a module", "a package", "names of a module", "a module in parts"],
)
def test_an_old_name_warns_once_where_it_is_used(program, expected):
    assert messages(program) == [(message, "<program>", 1) for message in expected]
    assert messages(program) == []


@pytest.mark.usefixtures("packages")
def test_names_that_never_were_are_errors():
    with pytest.raises(ImportError, match="cannot import name 'other' from 'before.gone'"):
        exec("from before.gone import other")
    with pytest.raises(AttributeError, match="module 'before.partly' has no attribute 'other'"):
        resolve("before.partly", "other")
    with pytest.raises(ModuleNotFoundError, match=r"before\.nowhere"):
        resolve("before.nowhere")


def test_importing_piston_imports_nothing_that_moved():
    program = "import piston, sys; print(*(n for n in sys.modules if 'piston' in n))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ours = {name for name in result.stdout.split() if not name.startswith("__editable__")}
    assert ours == {"piston", "piston.moved"}
