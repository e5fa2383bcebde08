import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piston.logs import forget_warnings
from piston.tokenizers.fast import FASTPrompt, FASTTokenizer
from piston.tokenizers.text import BytesTokenizer, PaligemmaTokenizer
from piston.transforms.prompts import (
    ExtractFASTActions,
    InjectDefaultPrompt,
    TokenizeFASTInputs,
    TokenizePrompt,
    discretize_state,
)

HORIZON, DIM = 4, 3
KEYS = ("tokenized_prompt", "tokenized_prompt_mask", "token_ar_mask", "token_loss_mask")


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    forget_warnings()


@pytest.fixture(scope="module")
def cases(small_reference: Path) -> dict[str, Any]:
    return json.loads((small_reference / "transforms.json").read_text())


@pytest.fixture(scope="module")
def paligemma(reference: Path) -> PaligemmaTokenizer:
    return PaligemmaTokenizer(str(reference / "tokenizers" / "paligemma_tokenizer.model"))


@pytest.fixture(scope="module")
def fast_prompt() -> FASTPrompt:
    chunks = np.random.default_rng(0).uniform(-1, 1, size=(30, HORIZON, DIM))
    fast = FASTTokenizer.fit(chunks, vocab_size=300)
    return FASTPrompt(BytesTokenizer(), fast, vocab_size=1024, max_len=96)


class TestReference:
    @pytest.mark.parametrize("prefix", ["pi0", "pi05"])
    def test_prompts(
        self, prefix: str, cases: dict[str, Any], paligemma: PaligemmaTokenizer
    ) -> None:
        for case in cases["prompts"]:
            transform = TokenizePrompt(
                paligemma, len(case[f"{prefix}_tokens"]), discrete_state_input=prefix == "pi05"
            )
            result = transform({"prompt": case["prompt"], "state": np.array(case["state"])})
            assert result["tokenized_prompt"].tolist() == case[f"{prefix}_tokens"]
            assert result["tokenized_prompt_mask"].tolist() == case[f"{prefix}_mask"]

    def test_fast(
        self, cases: dict[str, Any], paligemma: PaligemmaTokenizer, reference: Path
    ) -> None:
        fast = FASTTokenizer(str(reference / "tokenizers" / "fast"))
        for case in cases["fast"]:
            prompt = FASTPrompt(paligemma, fast, 257_152, len(case["tokens"]))
            start = case["ar_mask"].index(1)
            opening = paligemma.decode(case["tokens"][:start])
            task = opening.removeprefix("Task: ").split(", State:")[0]
            data = {"prompt": task.upper(), "state": np.array(case["state"])}
            recorded = {**data, "actions": np.array(case["actions"])}
            result = TokenizeFASTInputs(prompt)(recorded)
            for key, expected in zip(KEYS, ("tokens", "mask", "ar_mask", "loss_mask")):
                assert result[key].tolist() == case[expected], key

            for sent in (data, recorded):  # a client may send actions: they are not written
                at_inference = TokenizeFASTInputs(prompt).for_inference()(sent)
                assert at_inference["tokenized_prompt_mask"].sum() == start
            assert at_inference["tokenized_prompt"].tolist()[:start] == case["tokens"][:start]
            assert not at_inference["token_ar_mask"].any()

            extract = ExtractFASTActions(prompt, case["horizon"], case["dim"])
            actions = extract({"actions": np.array(case["tokens"][start:])})["actions"]
            np.testing.assert_allclose(actions, case["decoded"], atol=1e-6)


def test_text_before_tokens() -> None:
    data = {"prompt": " Pick_up\nthe CUBE ", "state": np.array([-1.0, 0.0, 1.0])}
    text = BytesTokenizer()

    def read(result: dict[str, Any]) -> str:
        tokens = result["tokenized_prompt"][result["tokenized_prompt_mask"]]
        assert tokens[0] == text.bos_id
        assert text.bos_id not in tokens[1:]
        return text.decode(tokens)

    assert read(TokenizePrompt(text, 80)(data)) == "Pick up the CUBE\n"
    assert (
        read(TokenizePrompt(text, 80, discrete_state_input=True)(data))
        == "Task: Pick up the CUBE, State: 0 128 255;\nAction: "
    )


def test_fast_keeps_line_breaks_and_lowers_case(fast_prompt: FASTPrompt) -> None:
    data = {"prompt": " Pick_up\nthe CUBE ", "state": np.array([0.5])}
    result = TokenizeFASTInputs(fast_prompt, write_actions=False)(data)
    text = fast_prompt.text.decode(result["tokenized_prompt"])
    assert text == "Task: pick up\nthe cube, State: 192;\n"


def test_bins() -> None:
    state = np.array([-5, -1.0001, -1, -0.9999, 0, 0.9999, 1, 5])
    assert discretize_state(state).tolist() == [-1, -1, 0, 0, 128, 255, 255, 255]


def test_state_below_range_warns_once_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        discretize_state(np.array([[0.0, -0.5, 0.1], [0.0, -1.5, -1.25]]))
    assert len(caplog.records) == 1
    assert "2 of 6" in caplog.text
    assert "-1.5, in dimension 1" in caplog.text


def test_truncation_warns_once_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    transform = TokenizePrompt(BytesTokenizer(), 10)
    for _ in range(3):
        result = transform({"prompt": np.array(["ok", "a" * 30])})
    assert len(caplog.records) == 1
    assert "1 of 2 prompts" in caplog.text
    assert "10 tokens (the longest has 32)" in caplog.text
    assert result["tokenized_prompt"].shape == (2, 10)
    assert result["tokenized_prompt_mask"].tolist()[1] == [True] * 10
    # What fits exactly is not cut.
    caplog.clear()
    TokenizePrompt(BytesTokenizer(), 9)({"prompt": "a" * 7})
    assert not caplog.records


def test_fast_truncation_cuts_all_four(fast_prompt: FASTPrompt) -> None:
    data = {"prompt": "go", "state": np.zeros(2), "actions": np.zeros((HORIZON, DIM))}
    whole = TokenizeFASTInputs(fast_prompt)(data)
    start = whole["token_ar_mask"].argmax()
    inside_actions = int(start) + 5
    assert whole["tokenized_prompt_mask"].sum() > inside_actions
    short = dataclasses.replace(fast_prompt, max_len=inside_actions)
    cut = TokenizeFASTInputs(short)(data)
    for key in KEYS:
        np.testing.assert_array_equal(cut[key], whole[key][:inside_actions])
    before_actions = dataclasses.replace(fast_prompt, max_len=int(start) - 2)
    assert not TokenizeFASTInputs(before_actions)(data)["token_loss_mask"].any()


BATCHES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3)


@settings(max_examples=40, deadline=None)
@given(st.data(), BATCHES, st.booleans(), st.booleans())
def test_a_batch_equals_one_by_one(
    fast_prompt: FASTPrompt,
    data: st.DataObject,
    batch: tuple[int, ...],
    one_prompt: bool,
    training: bool,
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    words = st.text("aB_ \nœ", max_size=8)
    prompt: Any = data.draw(words)
    if not one_prompt:
        prompt = np.empty(batch, dtype=object)
        for index in np.ndindex(batch):
            prompt[index] = data.draw(words)
    sample = {"prompt": prompt, "state": rng.uniform(-1.2, 1.2, size=(*batch, 2))}
    if training:
        sample["actions"] = rng.uniform(-1, 1, size=(*batch, HORIZON, DIM))
    for transform in (
        TokenizePrompt(BytesTokenizer(), 20),
        TokenizePrompt(BytesTokenizer(), 40, discrete_state_input=True),
        TokenizeFASTInputs(fast_prompt, write_actions=training),
    ):
        before = copy.deepcopy(sample)
        together = transform(sample)
        np.testing.assert_equal(sample, before)
        assert "prompt" not in together
        for index in np.ndindex(batch):
            one = {k: v if isinstance(v, str) else v[index] for k, v in sample.items()}
            alone = transform(one)
            assert alone.keys() == together.keys()
            for key in alone:
                np.testing.assert_array_equal(together[key][index], alone[key])


def test_dtypes(fast_prompt: FASTPrompt) -> None:
    data = {"prompt": "go", "state": np.zeros((5, 2), np.float32)}
    result = TokenizeFASTInputs(fast_prompt, write_actions=False)(data)
    assert [result[key].dtype for key in KEYS] == [np.int32, bool, np.int32, bool]
    result = TokenizePrompt(BytesTokenizer(), 12)(data)
    assert [result[key].dtype for key in KEYS[:2]] == [np.int32, bool]
    assert result["tokenized_prompt"].shape == (5, 12)


def test_extract_takes_leading_axes_and_survives_nonsense(fast_prompt: FASTPrompt) -> None:
    chunks = np.random.default_rng(1).uniform(-1, 1, size=(2, 2, HORIZON, DIM))
    tokens = np.zeros((2, 2, 60), dtype=np.int32)
    for index in np.ndindex(2, 2):
        written = fast_prompt.encode(chunks[index])
        tokens[index][: len(written)] = written
    tokens[1, 1] = 77
    extract = ExtractFASTActions(fast_prompt, HORIZON, DIM)
    data = {"actions": tokens, "state": np.zeros((2, 2, 3))}
    actions = extract(data)["actions"]
    assert data["actions"] is tokens
    assert actions.dtype == np.float32
    assert not actions[1, 1].any()
    for index in [(0, 0), (0, 1), (1, 0)]:
        # Four coefficients, each rounded to a tenth.
        assert np.abs(actions[index] - chunks[index]).max() <= 0.05 * np.sqrt(HORIZON) + 1e-6
        np.testing.assert_array_equal(
            extract({"actions": tokens[index]})["actions"], actions[index]
        )


def test_default_prompt() -> None:
    data = {"state": np.zeros(2)}
    assert InjectDefaultPrompt("go")(data)["prompt"] == "go"
    assert InjectDefaultPrompt("go")({"prompt": "stop"})["prompt"] == "stop"
    assert "prompt" not in InjectDefaultPrompt(None)(data)
    assert "prompt" not in data


def test_what_is_missing_or_wrong_is_named(fast_prompt: FASTPrompt) -> None:
    flow = TokenizePrompt(BytesTokenizer(), 40, discrete_state_input=True)
    fast = TokenizeFASTInputs(fast_prompt)
    for transform in (flow, fast):
        with pytest.raises(KeyError, match="default_prompt"):
            transform({"state": np.zeros(3)})
        with pytest.raises(KeyError, match="state"):
            transform({"prompt": "go"})
        with pytest.raises(ValueError, match=r"shape \(2,\).*\(3,\)"):
            transform({"prompt": np.array(["a", "b"]), "state": np.zeros((3, 4))})
        with pytest.raises(ValueError, match="expected a string"):
            transform({"prompt": b"bytes", "state": np.zeros(3)})
    with pytest.raises(KeyError, match="key 'actions' is missing"):
        fast({"prompt": "go", "state": np.zeros(3)})
    with pytest.raises(ValueError, match=r"\(3, 4, 3\)"):
        fast({"prompt": "go", "state": np.zeros((2, 4)), "actions": np.zeros((3, 4, 3))})
    with pytest.raises(KeyError, match="actions"):
        ExtractFASTActions(fast_prompt, HORIZON, DIM)({"state": np.zeros(3)})


def test_transforms_pickle(fast_prompt: FASTPrompt) -> None:
    data = {"prompt": "go", "state": np.zeros(3), "actions": np.zeros((HORIZON, DIM))}
    for transform in (
        InjectDefaultPrompt("go"),
        TokenizePrompt(BytesTokenizer(), 40, discrete_state_input=True),
        TokenizeFASTInputs(fast_prompt),
    ):
        again = pickle.loads(pickle.dumps(transform))
        assert again == transform
        np.testing.assert_equal(again(data), transform(data))
