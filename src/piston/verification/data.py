"""Reference cases of data: transforms, norm statistics and data sets.

    transforms.json, transforms.npz   prompts, masks and schedules, and arrays
    norm_stats.json                   a released file is read and written back byte for byte
    lerobot_v30/                      a data set
    lerobot_v30_expected_items.npz    "<index>/<field>": the values of item <index>

A field of an item is one of its keys, or the last part of a camera's name (frames as channels × h ×
w). A sequence is as long as its `<key>_is_pad`. A data set without expected items is compared with
itself: frames found by seeking against the same frames decoded in order.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from piston.config import CosineDecaySchedule
from piston.robots.aloha import JOINTS, AlohaInputs, AlohaOutputs
from piston.tokenizers.fast import FASTPrompt, FASTTokenizer
from piston.tokenizers.text import PaligemmaTokenizer, TextTokenizer
from piston.transforms import compose
from piston.transforms.actions import AbsoluteActions, DeltaActions, make_bool_mask
from piston.transforms.images import resize_with_pad
from piston.transforms.normalize import (
    FILE_NAME,
    Normalize,
    NormStats,
    Unnormalize,
    read_norm_stats,
    write_norm_stats,
)
from piston.transforms.prompts import ExtractFASTActions, TokenizeFASTInputs, TokenizePrompt
from piston.verification import Quantity, close, equal, failed

# Decoders and parquet are imported only to replay a data set.
if TYPE_CHECKING:
    from piston.data.dataset import LeRobotDataset

_TOLERANCE = 1e-6
# openpi computes rates in float32.
_RATE_TOLERANCE = 2e-7
_SUFFIX = "_expected_items.npz"
_PAD = "_is_pad"
# Names of values that the comparison of another one needs, or that `_aloha` compares.
_USED = (
    r"aloha/(state|actions)|aloha/adapt_(True|False)/(plain|delta)/(state|(model|robot)_actions)|"
    r"resize/.*/out|norm/(x|wide_x|mean|std|q01|q99)"
)


def replay_transforms(path: Path) -> Iterator[Quantity]:
    values: dict[str, Any] = {**json.loads(path.read_text()), **np.load(path.with_suffix(".npz"))}
    for case in sorted({m[1] for name in values if (m := re.match(r"(aloha/adapt_.*)/", name))}):
        yield from _aloha(case, values)
    for name, value in values.items():
        if found := re.fullmatch(r"make_bool_mask\(([-\d, ]*)\)", name):
            dims = [int(word) for word in found[1].split(",") if word.strip()]
            yield equal(name, make_bool_mask(*dims), value)
        elif name.startswith("lr/"):
            # Relative to the largest rate: an absolute 1e-6 would not test rates of 1e-5.
            expected, largest = np.array(value["lr"]), np.abs(value["lr"]).max()
            rates = np.array(list(map(CosineDecaySchedule(**value["args"]), value["steps"])))
            yield close(f"{name} / largest", rates / largest, expected / largest, _RATE_TOLERANCE)
        elif found := re.fullmatch(r"norm/(un)?normalized(_wide)?_quantile_(True|False)", name):
            stats = NormStats(*(values[f"norm/{part}"] for part in ("mean", "std", "q01", "q99")))
            convert = (Unnormalize if found[1] else Normalize)({"x": stats}, found[3] == "True")
            x = values["norm/wide_x" if found[2] else "norm/x"]
            yield close(name, convert({"x": x})["x"], value, _TOLERANCE)
        elif found := re.fullmatch(r"(resize/.*)/in", name):
            expected = values[f"{found[1]}/out"]
            yield equal(found[1], resize_with_pad(value, *expected.shape[-3:-1]), expected)
        elif name in ("prompts", "fast"):
            yield from _tokenized(name, value, path.parent / "tokenizers")
        elif not re.fullmatch(_USED, name):
            yield failed(name, "not understood: nothing here compares it")


def _aloha(case: str, values: Mapping[str, Any]) -> Iterator[Quantity]:
    _, adapt, kind = case.split("/")
    adapt_to_pi = adapt == "adapt_True"
    delta = [kind == "delta" and on for on in JOINTS]
    to_model = compose([AlohaInputs(adapt_to_pi=adapt_to_pi), DeltaActions(delta)])
    to_robot = compose([AbsoluteActions(delta), AlohaOutputs(adapt_to_pi=adapt_to_pi)])
    state, actions = values["aloha/state"], values["aloha/actions"]
    # The adapter needs an image; it does not change the values.
    black = np.zeros((*state.shape[:-1], 2, 2, 3), np.uint8)
    inputs = to_model({"images": {"cam_high": black}, "state": state, "actions": actions})
    expected = {n: values[f"{case}/{n}"] for n in ("state", "model_actions", "robot_actions")}
    back = to_robot({"state": expected["state"], "actions": expected["model_actions"]})
    found = (inputs["state"], inputs["actions"], back["actions"])
    for actual, (name, value) in zip(found, expected.items()):
        yield close(f"{case}/{name}", actual, value, _TOLERANCE)


def _tokenized(kind: str, cases: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[Quantity]:
    # The tokenizers beside the case if there are any, else the public ones.
    model = folder / "paligemma_tokenizer.model"
    text = PaligemmaTokenizer(*([str(model)] if model.is_file() else []))
    if kind == "fast":
        fast = FASTTokenizer(*([str(folder / "fast")] if (folder / "fast").is_dir() else []))
        for index, case in enumerate(cases):
            yield from _fast(f"fast {index} ({case['horizon']}×{case['dim']})", case, text, fast)
        return
    for index, case in enumerate(cases):
        sample = {"prompt": case["prompt"], "state": np.array(case["state"])}
        for family, with_state in (("pi0", False), ("pi05", True)):
            expected, mask = case[f"{family}_tokens"], np.array(case[f"{family}_mask"], bool)
            result = TokenizePrompt(text, len(expected), discrete_state_input=with_state)(sample)
            yield equal(f"prompt {index} {family} tokens", result["tokenized_prompt"], expected)
            yield equal(f"prompt {index} {family} mask", result["tokenized_prompt_mask"], mask)


def _fast(
    name: str, case: Mapping[str, Any], text: TextTokenizer, fast: FASTTokenizer
) -> Iterator[Quantity]:
    actions, chunk = np.array(case["actions"]), (case["horizon"], case["dim"])
    yield equal(f"{name} codes", fast.encode(actions), case["fast_tokens"])
    decoded = fast.decode(case["fast_tokens"], *chunk)
    yield close(f"{name} decoded", decoded, case["decoded"], _TOLERANCE)
    prompt = FASTPrompt(text, fast, vocab_size=text.vocab_size, max_len=len(case["tokens"]))
    task = case.get("prompt")
    if task is None:  # the file holds it only as tokens
        written = text.decode(case["tokens"])
        found = re.match(r"Task: (.*?), State: ", written, re.DOTALL)
        if found is None:
            raise ValueError(f"{name}: no 'Task: …, State: …' in its tokens: {written[:60]!r}")
        task = found[1]
    sample = {"prompt": task, "state": np.array(case["state"]), "actions": actions}
    result = TokenizeFASTInputs(prompt)(sample)
    keys = ("tokenized_prompt", "tokenized_prompt_mask", "token_ar_mask", "token_loss_mask")
    for key, part in zip(keys, ("tokens", "mask", "ar_mask", "loss_mask")):
        yield equal(f"{name} {part}", np.asarray(result[key], int), np.asarray(case[part], int))
    generated = np.array(case["tokens"])[np.array(case["loss_mask"], bool)]
    # Without an end, the tokens, and with them the chunk, were truncated.
    if generated.size and generated[-1] == text.eos_id:
        extracted = ExtractFASTActions(prompt, *chunk)({"actions": generated})["actions"]
        yield close(f"{name} extracted", extracted, case["decoded"], _TOLERANCE)


def replay_norm_stats(path: Path) -> Iterator[Quantity]:
    with tempfile.TemporaryDirectory() as folder:
        written = write_norm_stats(folder, read_norm_stats(path)).read_bytes()
    expected = np.frombuffer((path / FILE_NAME).read_bytes(), np.uint8)
    yield equal("bytes written back", np.frombuffer(written, np.uint8), expected)


def dataset_folder(path: Path) -> Path:
    """Return the folder of a data set, given it or the file of its expected items."""
    return path.with_name(path.name.removesuffix(_SUFFIX))


def replay_dataset(path: Path) -> Iterator[Quantity]:
    from piston.data.dataset import open_dataset

    folder = dataset_folder(path)
    expected_file = folder.with_name(folder.name + _SUFFIX)
    if not expected_file.is_file():
        yield from _seeking(open_dataset(folder))
        return
    try:
        stored = dict(np.load(expected_file))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{expected_file} cannot be read: {error}") from None
    fields: dict[str, dict[int, np.ndarray]] = {}
    for name, value in stored.items():
        index, _, field = name.partition("/")
        if not index.isdecimal() or not field:
            raise ValueError(f"{expected_file} holds {name!r}; expected names are <index>/<field>.")
        fields.setdefault(field, {})[int(index)] = value
    lengths = {
        field.removesuffix(_PAD): len(next(iter(values.values())))
        for field, values in fields.items()
        if field.endswith(_PAD)
    }
    dataset = open_dataset(folder, sequences=lengths)
    indices = sorted(set().union(*fields.values()))
    if indices and indices[-1] >= len(dataset):
        raise ValueError(
            f"{expected_file} holds item {indices[-1]}, but {folder} has only {len(dataset)} "
            "frames."
        )
    items = {index: dataset[index] for index in indices}
    for field, values in fields.items():
        camera = next((c for c in dataset.cameras if c == field or c.endswith(f".{field}")), None)
        name = f"{field} ({len(values)} items)"
        if camera is None and field not in items[next(iter(values))]:
            yield failed(name, f"items have no {field!r}")
            continue
        compared = []
        for index, value in values.items():
            actual = items[index][camera or field]
            compared.append(equal(name, np.moveaxis(actual, -1, -3) if camera else actual, value))
        different = next((one for one in compared if not np.isfinite(one.error)), compared[0])
        yield Quantity(name, sum(one.error for one in compared), 0.0, different.note)


def _seeking(dataset: LeRobotDataset) -> Iterator[Quantity]:
    for camera in dataset.cameras:
        wrong, count = 0.0, 0
        for episode, (start, _) in zip(dataset.episodes, dataset.episode_bounds):
            if camera not in episode.videos or episode.videos[camera].start > 0:
                continue
            steps = sorted({0, episode.length // 3, episode.length - 1})
            path = dataset.metadata.root / episode.videos[camera].path
            in_order = _decode_in_order(path, steps)
            for step in reversed(steps):  # backwards, so that each needs a seek
                frame = dataset.frame(int(start) + step, [camera])[camera]
                wrong += equal(camera, frame, in_order[step]).error
                count += 1
        if count:
            yield Quantity(f"{camera} ({count} frames)", wrong, 0.0, "by seeking and in order")
    rows = [len(dataset.column(key)) for key in dataset.keys]
    yield equal("rows of every column", rows, [len(dataset)] * len(rows))


def _decode_in_order(path: Path, steps: list[int]) -> dict[int, np.ndarray]:
    """Decode a file from its start, without seeking."""
    import av

    frames = {}
    try:
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number in steps:
                    frames[number] = frame.to_ndarray(format="rgb24")
    except av.FFmpegError as error:
        raise ValueError(f"{path} cannot be decoded: {error}") from None
    if missing := [step for step in steps if step not in frames]:
        raise ValueError(f"{path} ends before frame {missing[0]}.")
    return frames
