"""What stands behind a prompt: text and actions that a flow model learns to write."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from piston.logs import forget_warnings
from piston.tokenizers.fast import FASTPrompt, FASTTokenizer
from piston.tokenizers.text import BytesTokenizer, PaligemmaTokenizer, TextTokenizer
from piston.transforms.prompts import ResponseTokens, TokenizePrompt

HORIZON, DIM = 3, 2
MAX_PROMPT, MAX_TEXT, MAX_FAST = 48, 16, 32
STATE = np.array([-1.0, 0.0, 1.0])
ACTIONS = np.array([[0.1, -0.4], [0.2, -0.4], [0.3, -0.4]])
BYTES = BytesTokenizer()
MASKS = ("tokenized_prompt_mask", "token_ar_mask", "token_loss_mask", "token_hidden_mask")
# What follows the sentence "Lift it" in the prompt of a policy with and without subtasks.
PROMPTS = {
    ("pi0", False): "Lift it\n",
    ("pi0", True): "Lift it\nSubtask: ",
    ("pi05", False): "Task: Lift it, State: 0 128 255;\nAction: ",
    ("pi05", True): "Task: Lift it, State: 0 128 255;\nSubtask: ",
}


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    forget_warnings()


@pytest.fixture(scope="module", params=["bytes", "paligemma"])
def text(request: pytest.FixtureRequest) -> TextTokenizer:
    if request.param == "bytes":
        return BYTES
    folder = request.getfixturevalue("reference")  # skips where there is none
    return PaligemmaTokenizer(str(folder / "tokenizers" / "paligemma_tokenizer.model"))


def fast_of(text: TextTokenizer, max_len: int = MAX_FAST) -> FASTPrompt:
    vocab_size = text.num_text_ids + 256 + 128
    return FASTPrompt(text, FASTTokenizer("bytes"), vocab_size, max_len)


def transform(
    text: TextTokenizer = BYTES,
    *,
    family: str = "pi0",
    subtasks: bool = True,
    fast: bool = True,
    max_text_len: int = MAX_TEXT,
) -> TokenizePrompt:
    response = ResponseTokens(max_text_len, subtasks, fast_of(text) if fast else None)
    return TokenizePrompt(text, MAX_PROMPT, family == "pi05", response)


def sample(**more: Any) -> dict[str, Any]:
    return {"prompt": " Lift_it ", "state": STATE, "actions": ACTIONS, **more}


def prompt_ids(text: TextTokenizer, family: str, subtasks: bool) -> list[int]:
    """π0's parts are encoded one by one, π0.5's as one text; what asks for a subtask by itself."""
    whole, cue = PROMPTS[family, subtasks], text.encode("Subtask: ") if subtasks else []
    if family == "pi05":
        return [*text.encode(whole.removesuffix("Subtask: "), bos=True), *cue]
    return [*text.encode("Lift it", bos=True), *text.encode("\n"), *cue]


def check(
    found: dict[str, Any], prompt: list[int], shown: list[int], hidden: list[int], max_len: int
) -> None:
    """A row: the prompt, then written tokens that the action expert sees, then those it does not.

    Behind them is padding.
    """
    row = [*prompt, *shown, *hidden]
    behind = [0] * (max_len - len(row))
    zeros, ones = [0] * len(prompt), [1] * (len(shown) + len(hidden))
    assert found["tokenized_prompt"].tolist() == [*row, *behind]
    assert found["tokenized_prompt_mask"].tolist() == [*[1] * len(row), *behind]
    assert found["token_ar_mask"].tolist() == [*zeros, *ones, *behind]
    assert found["token_loss_mask"].tolist() == [*zeros, *ones, *behind]
    visible = [0] * (len(prompt) + len(shown))
    assert found["token_hidden_mask"].tolist() == [*visible, *[1] * len(hidden), *behind]
    assert found["tokenized_prompt"].dtype == found["token_ar_mask"].dtype == np.int32
    for key in ("tokenized_prompt_mask", "token_loss_mask", "token_hidden_mask"):
        assert found[key].dtype == bool


@pytest.mark.parametrize("family", ["pi0", "pi05"])
class TestTraining:
    def test_text_only(self, text: TextTokenizer, family: str) -> None:
        found = transform(text, family=family, fast=False)(sample(subtask=" reach_it "))
        prompt = prompt_ids(text, family, subtasks=True)
        check(found, prompt, text.encode("reach it"), [text.eos_id], MAX_PROMPT + MAX_TEXT)
        assert not {"prompt", "subtask"} & found.keys()

    def test_actions_only(self, text: TextTokenizer, family: str) -> None:
        """π0.5's prompt ends with the opening already; π0's does not."""
        found = transform(text, family=family, subtasks=False, max_text_len=0)(sample())
        opening = "" if family == "pi05" else "Action: "
        written = fast_of(text).encode(ACTIONS, opening)
        check(found, prompt_ids(text, family, False), [], written, MAX_PROMPT + MAX_FAST)
        tokens = found["tokenized_prompt"].tolist()
        once = text.encode("Action")
        starts = [i for i in range(len(tokens)) if tokens[i : i + len(once)] == once]
        assert len(starts) == 1
        codes = fast_of(text).decode(tokens[starts[0] :], HORIZON, DIM)
        np.testing.assert_allclose(codes, ACTIONS, atol=0.1)

    def test_both(self, text: TextTokenizer, family: str) -> None:
        found = transform(text, family=family)(sample(subtask="reach it"))
        hidden = [text.eos_id, *fast_of(text).encode(ACTIONS)]
        prompt, shown = prompt_ids(text, family, subtasks=True), text.encode("reach it")
        check(found, prompt, shown, hidden, MAX_PROMPT + MAX_TEXT + MAX_FAST)

    @pytest.mark.parametrize("label", [{}, {"subtask": ""}, {"subtask": " "}, {"subtask": None}])
    def test_a_frame_without_a_label_has_no_text(self, family: str, label: dict[str, Any]) -> None:
        """Nor anything that asks for it: FAST tokens must not be learned as an answer to that."""
        prompt = prompt_ids(BYTES, family, subtasks=False)
        found = transform(family=family)(sample(**label))
        written = fast_of(BYTES).encode(ACTIONS, "" if family == "pi05" else "Action: ")
        check(found, prompt, [], written, MAX_PROMPT + MAX_TEXT + MAX_FAST)
        found = transform(family=family, fast=False)(sample(**label))
        check(found, prompt, [], [], MAX_PROMPT + MAX_TEXT)

    def test_a_question_needs_neither_state_nor_actions(
        self, text: TextTokenizer, family: str
    ) -> None:
        asked = {"question": " How_many\ncups? ", "answer": "two"}
        prompt = text.encode("Question: How many cups?\n", bos=True) + text.encode("Answer: ")
        for more in ({}, {"state": np.zeros(4)}, {"prompt": "not used"}):
            for subtasks in (False, True):
                found = transform(text, family=family, subtasks=subtasks)({**asked, **more})
                max_len = MAX_PROMPT + MAX_TEXT + MAX_FAST
                check(found, prompt, text.encode("two"), [text.eos_id], max_len)
                assert not {"prompt", "question", "answer"} & found.keys()

    @pytest.mark.parametrize("fast", [False, True])
    def test_a_batch_equals_one_by_one(self, family: str, fast: bool) -> None:
        labels = np.array([["reach", ""], ["grasp it", "lift"], ["", ""]], dtype=object)
        random = np.random.default_rng(0)
        batch = {
            "prompt": np.array([["a", "bb"], ["ccc", "d"], ["e", "f"]]),
            "state": random.uniform(-1, 1, (3, 2, 2)),
            "actions": random.uniform(-1, 1, (3, 2, HORIZON, DIM)),
            "subtask": labels,
        }
        one_label = {**batch, "subtask": "reach"}
        trained = transform(family=family, fast=fast)
        for data in (batch, one_label):
            for step in (trained, trained.for_inference()):
                together = step(data)
                for index in np.ndindex(3, 2):
                    alone = step(
                        {k: v if isinstance(v, str) else v[index] for k, v in data.items()}
                    )
                    assert alone.keys() == together.keys()
                    for key in alone:
                        np.testing.assert_array_equal(together[key][index], alone[key])

    def test_without_targets_nothing_changed(self, family: str) -> None:
        plain = TokenizePrompt(BYTES, MAX_PROMPT, family == "pi05")
        for step in (plain, plain.for_inference()):
            found = step(sample())
            assert found.keys() == {
                *("state", "actions", "tokenized_prompt", "tokenized_prompt_mask")
            }
            row = BYTES.encode(PROMPTS[family, False], bos=True)
            assert found["tokenized_prompt"][: len(row)].tolist() == row
            assert found["tokenized_prompt_mask"].sum() == len(row)


@pytest.mark.parametrize("family", ["pi0", "pi05"])
class TestInference:
    def read(self, found: dict[str, Any]) -> tuple[str, str]:
        """The prompt, and what is given of what the model writes."""
        real, given = found["tokenized_prompt_mask"], found["token_ar_mask"].astype(bool)
        tokens = found["tokenized_prompt"]
        assert not given[~real].any()
        assert BYTES.eos_id not in tokens[real]
        return BYTES.decode(tokens[real & ~given]), BYTES.decode(tokens[given])

    def test_the_policy_writes_its_subtask(self, family: str) -> None:
        found = transform(family=family).for_inference()(sample())
        assert self.read(found) == (PROMPTS[family, True], "")
        assert found["writes_text"].shape == ()
        assert found["writes_text"].item() is True
        assert not {"token_loss_mask", "token_hidden_mask"} & found.keys()
        # The actions of a recorded frame are not written, and keep no room.
        assert found["tokenized_prompt"].shape == (MAX_PROMPT + MAX_TEXT,)

    def test_a_subtask_is_given(self, family: str) -> None:
        found = transform(family=family).for_inference()(sample(subtask=" reach_it"))
        assert self.read(found) == (PROMPTS[family, True], "reach it")
        assert found["writes_text"].item() is False

    def test_a_policy_without_subtasks(self, family: str) -> None:
        policy = transform(family=family, subtasks=False).for_inference()
        found = policy(sample())
        assert self.read(found) == (PROMPTS[family, False], "")
        assert found["writes_text"].item() is False
        for given in ("reach", np.array(["", "reach"])):
            data = sample(subtask=given, state=np.stack([STATE] * 2)) | {"actions": None}
            with pytest.raises(ValueError, match="a policy that has none. Leave it out"):
                policy({key: value for key, value in data.items() if value is not None})

    def test_a_question_is_answered(self, family: str) -> None:
        for subtasks in (False, True):
            policy = transform(family=family, subtasks=subtasks).for_inference()
            found = policy({"question": "How many?", "state": STATE})
            assert self.read(found) == ("Question: How many?\nAnswer: ", "")
            assert found["writes_text"].item() is True

    def test_some_of_a_batch_write(self, family: str) -> None:
        data = {"prompt": "go", "state": np.zeros((3, 2)), "subtask": np.array(["", "lift", ""])}
        found = transform(family=family).for_inference()(data)
        assert found["writes_text"].tolist() == [True, False, True]
        assert found["token_ar_mask"].sum(-1).tolist() == [0, 4, 0]


def test_a_text_that_is_too_long_is_named() -> None:
    step = transform()
    step(sample(subtask="x" * (MAX_TEXT - 1)))  # and its end
    for policy in (step, step.for_inference()):
        with pytest.raises(ValueError, match=r"The subtask 'x+' has 16 tokens .* keeps 16.*max_t"):
            policy(sample(subtask="x" * MAX_TEXT))
        with pytest.raises(ValueError, match="The answer 'yyyyyyyyyyyyyyyyyyyy' has 20 tokens"):
            policy({"question": "?", "answer": "y" * 20})


def test_questions_need_text_among_the_targets() -> None:
    with pytest.raises(ValueError, match="model.targets lacks text"):
        transform(subtasks=False, max_text_len=0)({"question": "?", "answer": "yes"})


@pytest.mark.parametrize("key", ["subtask", "answer"])
def test_what_is_no_text_is_refused(key: str) -> None:
    asked = {"question": "?"} if key == "answer" else {}
    with pytest.raises(ValueError, match=f"the {key} is 3; expected a string"):
        transform()(sample(**asked, **{key: 3}))
    with pytest.raises(ValueError, match=f"'{key}' has shape .2,."):
        transform()(sample(**asked, **{key: np.array(["a", "b"])}, state=np.zeros((3, 2))))


def test_fast_tokens_that_are_too_long_are_cut_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = transform(subtasks=False, max_text_len=0)
    short = dataclasses.replace(
        whole, response=dataclasses.replace(whole.response, fast=fast_of(BYTES, 12))
    )
    batch = sample(state=np.stack([STATE] * 2), actions=np.stack([ACTIONS] * 2))
    for _ in range(2):
        found = short(batch)
    assert len(caplog.records) == 1
    assert "2 of 2 chunks of FAST tokens are longer than the model's 12 tokens (the" in caplog.text
    assert "Raise model.max_fast_len." in caplog.text
    uncut, size = whole(batch), MAX_PROMPT + 12
    start = prompt_ids(BYTES, "pi0", subtasks=False)
    for key in ("tokenized_prompt", *MASKS):
        assert found[key].shape == (2, size)
        np.testing.assert_array_equal(
            found[key][:, : len(start) + 12], uncut[key][:, : len(start) + 12]
        )
    assert found["token_loss_mask"].sum(-1).tolist() == [12, 12]


def test_a_prompt_that_is_cut_keeps_its_response(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the response is lost, and neither is what asks for it."""
    found = transform(fast=False)(sample(prompt="p" * 80, subtask="reach"))
    assert "1 of 1 prompts are longer than the model's 48 tokens" in caplog.text
    cue = BYTES.encode("Subtask: ")
    prompt = [*BYTES.encode("p" * 80, bos=True)[: MAX_PROMPT - len(cue)], *cue]
    check(found, prompt, BYTES.encode("reach"), [BYTES.eos_id], MAX_PROMPT + MAX_TEXT)


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_prompt_before_actions_is_cut_with_a_warning(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = transform(family=family, subtasks=False, max_text_len=0)
    found = step(sample(prompt="p" * 80))
    assert "1 of 1 prompts are longer than the model's 48 tokens" in caplog.text
    assert found["token_ar_mask"].argmax() == MAX_PROMPT


def test_it_pickles() -> None:
    step = transform()
    data = sample(subtask="reach")
    np.testing.assert_equal(pickle.loads(pickle.dumps(step))(data), step(data))


def test_the_public_tokenizers_fit_together(reference: Path) -> None:
    """π0.5 with PaliGemma's text and the public FAST codes, in its vocabulary."""
    folder = reference / "tokenizers"
    text = PaligemmaTokenizer(str(folder / "paligemma_tokenizer.model"))
    fast = FASTPrompt(text, FASTTokenizer(str(folder / "fast")), 257_152, 64)
    step = TokenizePrompt(text, 100, True, ResponseTokens(24, True, fast))
    found = step(sample(subtask="reach it"))
    real = found["tokenized_prompt"][found["tokenized_prompt_mask"]]
    assert text.decode(real[~found["token_ar_mask"][: len(real)].astype(bool)]) == (
        "Task: Lift it, State: 0 128 255;\nSubtask: "
    )
    hidden = found["tokenized_prompt"][found["token_hidden_mask"]]
    assert hidden[0] == hidden[-1] == text.eos_id
    np.testing.assert_allclose(fast.decode(hidden[1:], HORIZON, DIM), ACTIONS, atol=0.1)
