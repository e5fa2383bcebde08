"""Transform cases: a `.json` of prompts, masks and schedules with a `.npz` of arrays beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from piston.config import CosineDecaySchedule
from piston.robots.aloha import AlohaInputs, AlohaOutputs
from piston.tokenizers import TextTokenizer
from piston.tokenizers.fast import FASTPrompt, FASTTokenizer
from piston.tokenizers.paligemma import PaligemmaTokenizer
from piston.transforms.actions import AbsoluteActions, DeltaActions, make_bool_mask
from piston.transforms.base import compose
from piston.transforms.images import resize_with_pad
from piston.transforms.normalize import Normalize, NormStats, Unnormalize
from piston.transforms.prompts import ExtractFASTActions, TokenizeFASTInputs, TokenizePrompt
from piston.verification.quantity import Quantity, close, equal, failed

_TOLERANCE = 1e-6
# The reference computes rates in float32.
_RATE_TOLERANCE = 2e-7
_ALOHA_DELTA = make_bool_mask(6, -1, 6, -1)
_Arrays = Mapping[str, np.ndarray]
_UNDERSTOOD = re.compile(
    r"(prompts|fast)$|lr/|make_bool_mask\(|aloha/(state|actions)$|resize/.*/(in|out)$|"
    r"aloha/adapt_(True|False)/(plain|delta)/(state|model_actions|robot_actions)$|"
    r"norm/(x|wide_x|mean|std|q01|q99)$|norm/(un)?normalized(_wide)?_quantile_(True|False)$"
)


def matches(path: Path) -> bool:
    return path.suffix == ".json" and path.with_suffix(".npz").is_file()


def replay(path: Path) -> Iterator[Quantity]:
    facts: dict[str, Any] = json.loads(path.read_text())
    arrays = dict(np.load(path.with_suffix(".npz")))
    for name in sorted((*facts, *arrays)):
        if not _UNDERSTOOD.match(name):
            yield failed(name, "not understood: nothing here compares it")
    yield from _masks(facts)
    yield from _schedules(facts)
    yield from _aloha(arrays)
    yield from _normalization(arrays)
    yield from _resize(arrays)
    if "prompts" in facts or "fast" in facts:
        text = _paligemma(path.parent)
        yield from _prompts(facts.get("prompts", []), text)
        yield from _fast(facts.get("fast", []), text, _public_fast(path.parent))


def _masks(facts: dict[str, Any]) -> Iterator[Quantity]:
    for name, expected in facts.items():
        if call := re.fullmatch(r"make_bool_mask\(([-\d, ]*)\)", name):
            dims = [int(word) for word in call[1].split(",") if word.strip()]
            yield equal(name, make_bool_mask(*dims), expected)


def _schedules(facts: dict[str, Any]) -> Iterator[Quantity]:
    for name, case in facts.items():
        if name.startswith("lr/"):
            schedule = CosineDecaySchedule(**case["args"])
            rates = np.array([schedule(step) for step in case["steps"]])
            # Of the largest: an absolute 1e-6 would say nothing about rates of 1e-5.
            expected = np.array(case["lr"])
            largest = np.abs(expected).max()
            yield close(f"{name} / largest", rates / largest, expected / largest, _RATE_TOLERANCE)


def _aloha(arrays: _Arrays) -> Iterator[Quantity]:
    for case in sorted({m[1] for name in arrays if (m := re.match(r"(aloha/adapt_.*)/", name))}):
        _, adapt, kind = case.split("/")
        adapt_to_pi = adapt == "adapt_True"
        delta = [kind == "delta" and on for on in _ALOHA_DELTA]
        to_model = compose([AlohaInputs(adapt_to_pi=adapt_to_pi), DeltaActions(delta)])
        to_robot = compose([AbsoluteActions(delta), AlohaOutputs(adapt_to_pi=adapt_to_pi)])
        state, actions = arrays["aloha/state"], arrays["aloha/actions"]
        # The adapter wants a picture; which one makes no difference to the numbers.
        black = np.zeros((*state.shape[:-1], 2, 2, 3), np.uint8)
        seen = to_model({"images": {"cam_high": black}, "state": state, "actions": actions})
        yield close(f"{case}/state", seen["state"], arrays[f"{case}/state"], _TOLERANCE)
        yield close(
            f"{case}/model_actions", seen["actions"], arrays[f"{case}/model_actions"], _TOLERANCE
        )
        back = to_robot(
            {"state": arrays[f"{case}/state"], "actions": arrays[f"{case}/model_actions"]}
        )
        yield close(
            f"{case}/robot_actions", back["actions"], arrays[f"{case}/robot_actions"], _TOLERANCE
        )


def _normalization(arrays: _Arrays) -> Iterator[Quantity]:
    if "norm/x" not in arrays:
        return
    stats = {"x": NormStats(*(arrays[f"norm/{part}"] for part in ("mean", "std", "q01", "q99")))}
    for name in sorted(arrays):
        if found := re.fullmatch(r"norm/(un)?normalized(_wide)?_quantile_(True|False)", name):
            kind = Unnormalize if found[1] else Normalize
            values = arrays["norm/wide_x" if found[2] else "norm/x"]
            actual = kind(stats, found[3] == "True")({"x": values})["x"]
            yield close(name, actual, arrays[name], _TOLERANCE)


def _resize(arrays: _Arrays) -> Iterator[Quantity]:
    for name in sorted(arrays):
        if found := re.fullmatch(r"(resize/.*)/in", name):
            expected = arrays[f"{found[1]}/out"]
            height, width = expected.shape[-3:-1]
            yield equal(found[1], resize_with_pad(arrays[name], height, width), expected)


def _prompts(cases: list[dict[str, Any]], text: TextTokenizer) -> Iterator[Quantity]:
    for index, case in enumerate(cases):
        sample = {"prompt": case["prompt"], "state": np.array(case["state"])}
        for family, state_in_prompt in (("pi0", False), ("pi05", True)):
            expected = case[f"{family}_tokens"]
            tokenize = TokenizePrompt(text, len(expected), discrete_state_input=state_in_prompt)
            result = tokenize(sample)
            name = f"prompt {index} {family}"
            yield equal(f"{name} tokens", result["tokenized_prompt"], expected)
            mask = np.array(case[f"{family}_mask"], bool)
            yield equal(f"{name} mask", result["tokenized_prompt_mask"], mask)


def _fast(
    cases: list[dict[str, Any]], text: TextTokenizer, fast: FASTTokenizer
) -> Iterator[Quantity]:
    for index, case in enumerate(cases):
        name = f"fast {index} ({case['horizon']}×{case['dim']})"
        actions, state = np.array(case["actions"]), np.array(case["state"])
        codes = fast.encode(actions)
        yield equal(f"{name} codes", codes, case["fast_tokens"])
        decoded = fast.decode(case["fast_tokens"], case["horizon"], case["dim"])
        yield close(f"{name} decoded", decoded, case["decoded"], _TOLERANCE)
        prompt = FASTPrompt(text, fast, vocab_size=text.vocab_size, max_len=len(case["tokens"]))
        task = case["prompt"] if "prompt" in case else _task_of(case, text)
        sample = {"prompt": task, "state": state, "actions": actions}
        result = TokenizeFASTInputs(prompt)(sample)
        yield equal(f"{name} tokens", result["tokenized_prompt"], case["tokens"])
        for key, part in (
            ("tokenized_prompt_mask", "mask"),
            ("token_ar_mask", "ar_mask"),
            ("token_loss_mask", "loss_mask"),
        ):
            yield equal(f"{name} {part}", np.asarray(result[key], int), np.asarray(case[part], int))
        generated = np.array(case["tokens"])[np.array(case["loss_mask"], bool)]
        if generated.size == 0 or generated[-1] != text.eos_id:
            continue  # the tokens were cut, and with them the chunk
        extract = ExtractFASTActions(prompt, case["horizon"], case["dim"])
        extracted = extract({"actions": generated})["actions"]
        yield close(f"{name} extracted", extracted, case["decoded"], _TOLERANCE)


def _task_of(case: dict[str, Any], text: TextTokenizer) -> str:
    """The sentence is not in the file as text, only inside the tokens."""
    found = re.match(r"Task: (.*?), State: ", text.decode(case["tokens"]), re.DOTALL)
    if found is None:
        raise ValueError(f"No 'Task: …, State: …' in a FAST case's tokens: {case['tokens'][:20]}…")
    return found[1]


def _paligemma(folder: Path) -> PaligemmaTokenizer:
    """The tokenizer beside the case where there is one, else the public one."""
    beside = folder / "tokenizers" / "paligemma_tokenizer.model"
    return PaligemmaTokenizer(str(beside)) if beside.is_file() else PaligemmaTokenizer()


def _public_fast(folder: Path) -> FASTTokenizer:
    beside = folder / "tokenizers" / "fast"
    return FASTTokenizer(str(beside)) if beside.is_dir() else FASTTokenizer()
