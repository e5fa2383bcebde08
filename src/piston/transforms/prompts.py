"""Prompts: where the sentence comes from, how it is worded for each model, and its tokens.

The wording of π0, π0.5 and π0-FAST is defined here only. The state must be normalised and not yet
padded.

Dims: s state, l prompt length, h horizon, a action dim; `*b` any leading batch axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from piston.logs import warn_once
from piston.tokenizers.fast import OPENING, FASTPrompt
from piston.tokenizers.text import TextTokenizer
from piston.transforms import TEXTS, Data, missing_key, require, require_numbers

logger = logging.getLogger(__name__)

# The left edges of the 256 bins of a state's numbers.
_STATE_BINS = np.linspace(-1, 1, 256 + 1)[:-1]

# What may be too long, and what to do about it.
_CUT_PROMPT = ("prompts", "Raise model.max_token_len, or shorten the prompt.")
_CUT_CODES = ("chunks of FAST tokens", "Raise model.max_fast_len.")


def _clean(prompt: str) -> str:
    """Return one line of words, as π0 and π0.5 read it; capitals stay."""
    return prompt.strip().replace("_", " ").replace("\n", " ")


def _task_and_state(words: str, bins: Int[np.ndarray, " s"]) -> str:
    return f"Task: {words}, State: {' '.join(map(str, bins.tolist()))};\n"


def discretize_state(state: Float[np.ndarray, "*b s"]) -> Int[np.ndarray, "*b s"]:
    """Return each number's bin of 256 in [−1, 1]; 255 above, and −1 below.

    −1 is not a bin, but the released weights were trained with it.
    """
    bins = np.digitize(state, _STATE_BINS) - 1
    below = bins < 0
    if below.any():
        lowest = (np.min(state), np.argmin(state) % np.shape(state)[-1])
        warn_once(
            logger,
            "state below -1",
            "%d of %d numbers of the state lie below −1 (the lowest is %.4g, in dimension %d): "
            "they are written as -1 in the prompt, as for the released weights. If there are "
            "many, check the normalisation statistics.",
            *(below.sum(), below.size, *lowest),
        )
    return bins


@dataclasses.dataclass(frozen=True)
class InjectDefaultPrompt:
    """Add a prompt to data that have none."""

    prompt: str | None

    def __call__(self, data: Data) -> Data:
        if self.prompt is None or data.get("prompt") is not None:
            return data
        return {**data, "prompt": self.prompt}


@dataclasses.dataclass(frozen=True)
class ResponseTokens:
    """What a flow model with a language side learns to write behind its prompt.

        <bos>prompt   reach for the cube<eos>   Action: codes |<eos>   <pad> …
        ar      0 0   1 1 1 1 1 1 1 1 1  1       1 1 1 1 1 1 1  1       0 0
        hidden  0 0   0 0 0 0 0 0 0 0 0  1       1 1 1 1 1 1 1  1       0 0

    The action expert does not attend to hidden tokens. In training all tokens behind the prompt are
    learned. At inference (`training` False) only a text that is given follows, without its end.
    """

    # Tokens kept for the text; 0: the model writes none.
    max_text_len: int
    # Whether the robot's policy writes a subtask before its actions.
    subtasks: bool
    # How actions are written; None: they are not.
    fast: FASTPrompt | None = None
    training: bool = True

    def for_inference(self) -> ResponseTokens:
        return dataclasses.replace(self, fast=None, training=False)

    @property
    def max_len(self) -> int:
        return self.max_text_len + (0 if self.fast is None else self.fast.max_len)

    def text(self, tokenizer: TextTokenizer, text: str, kind: str) -> list[int]:
        """Return the tokens of a subtask or an answer. Raise ValueError if they are too many."""
        ids = tokenizer.encode(_clean(text))
        if len(ids) >= self.max_text_len:
            raise ValueError(
                f"The {kind} {text!r} has {len(ids)} tokens and an end token; the model keeps "
                f"{self.max_text_len}. Shorten it, or raise model.max_text_len."
            )
        return ids

    def hidden(
        self,
        data: Data,
        batch: tuple[int, ...],
        texts: Sequence[Sequence[int] | None],
        openings: Sequence[str],
    ) -> list[list[int]]:
        """Return the tokens after each text: its end, and the actions if the model learns them."""
        ends = [[] if text is None else [TextTokenizer.eos_id] for text in texts]
        if self.fast is None or "actions" not in data:
            return ends
        codes = _codes(data, batch, self.fast, openings, "TokenizePrompt")
        codes = _cut(codes, self.fast.max_len, *_CUT_CODES)
        return [[*end, *ids] for end, ids in zip(ends, codes)]


@dataclasses.dataclass(frozen=True)
class TokenizePrompt:
    """Replace the prompt by its tokens, for a flow model.

    π0     BOS, the sentence, then "\\n" encoded by itself.
    π0.5   (`discrete_state_input`) BOS, then the sentence and the state in one text.

    With `response` further tokens follow: the text of `subtask` or `answer`, and the actions. A
    prompt before a subtask ends with "Subtask: ". The prompt of data with a `question` is the
    question alone.
    """

    tokenizer: TextTokenizer
    max_len: int
    discrete_state_input: bool = False
    response: ResponseTokens | None = None

    def for_inference(self) -> TokenizePrompt:
        if self.response is None:
            return self
        return dataclasses.replace(self, response=self.response.for_inference())

    def __call__(self, data: Data) -> Data:
        is_question = data.get("question") is not None
        with_state = self.discrete_state_input and not is_question
        key, cue = ("question", "Answer: ") if is_question else ("prompt", "Subtask: ")
        prompts, states = _prompts_and_states(data, key, with_state, "TokenizePrompt")
        batch, response = prompts.shape, self.response
        if response is None:
            rows = self._rows(prompts, states, [""] * prompts.size)
            return _with_tokens(data, batch, self.max_len, rows)
        texts = self._given(response, data, batch, is_question)
        writes = is_question or response.subtasks
        # In training a frame without a label has nothing to write.
        cues = [cue if writes and (t is not None or not response.training) else "" for t in texts]
        rows = self._rows(prompts, states, cues)
        shown = [text or [] for text in texts]
        max_len = self.max_len + response.max_len
        if response.training:
            # The prompt of π0.5 ends with the opening, unless a text follows it.
            openings = [OPENING if s is None or cue else "" for s, cue in zip(states, cues)]
            hidden = response.hidden(data, batch, texts, openings)
            return _with_tokens(data, batch, max_len, rows, shown, hidden)
        found = _with_tokens(data, batch, max_len, rows, shown)
        del found["token_loss_mask"]
        asked = np.array([writes and text is None for text in texts])
        return {**found, "writes_text": asked.reshape(batch)}

    def _rows(
        self, prompts: np.ndarray, states: Sequence[np.ndarray | None], cues: Sequence[str]
    ) -> list[list[int]]:
        """Return the tokens of each prompt; a cue at its end tells the model to write."""
        # A whole episode usually has one prompt.
        encode = functools.cache(self._prompt)
        rows = [
            encode(prompt, cue) if state is None else self._prompt(prompt, cue, state)
            for prompt, state, cue in zip(prompts.flat, states, cues, strict=True)
        ]
        ends = [self.tokenizer.encode(cue) if cue else [] for cue in cues]
        return _cut(rows, self.max_len, *_CUT_PROMPT, ends)

    def _prompt(
        self, prompt: str, cue: str, state: Int[np.ndarray, " s"] | None = None
    ) -> list[int]:
        encode, words = self.tokenizer.encode, _clean(prompt)
        if cue == "Answer: ":
            return encode(f"Question: {words}\n", bos=True)
        if state is None:
            return [*encode(words, bos=True), *encode("\n")]
        return encode(_task_and_state(words, state) + ("" if cue else OPENING), bos=True)

    def _given(
        self, response: ResponseTokens, data: Data, batch: tuple[int, ...], is_question: bool
    ) -> list[list[int] | None]:
        """Return the tokens of the text that each sample has; None for one without."""
        kind, name = "answer" if is_question else "subtask", "TokenizePrompt"
        if is_question and not response.max_text_len:
            raise ValueError(f"{name}: the model answers no questions: model.targets lacks text.")
        if data.get(kind) is None:
            return [None] * math.prod(batch)
        given = _texts(data, kind, batch, name)
        if not is_question and not response.subtasks and any(given.flat):
            raise ValueError(f"{name}: a subtask is given to a policy that has none. Leave it out.")
        encode = functools.cache(lambda text: response.text(self.tokenizer, text, kind))
        return [encode(text) if text.strip() else None for text in given.flat]


@dataclasses.dataclass(frozen=True)
class TokenizeFASTInputs:
    """Replace the prompt by tokens of prompt, state and, in training, actions.

        <bos>Task: …, State: …;\\n   Action: codes |<eos>   <pad> …
        ar    0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1 1 1 1 1     0 0 0
        loss  0 0 0 0 0 0 0 0 0 0    1 1 1 1 1 1 1 1 1 1     0 0 0

    At inference (`write_actions` False) only the left part is written.
    """

    prompt: FASTPrompt
    write_actions: bool = True

    def for_inference(self) -> TokenizeFASTInputs:
        return dataclasses.replace(self, write_actions=False)

    def __call__(self, data: Data) -> Data:
        fast, name = self.prompt, "TokenizeFASTInputs"
        prompts, states = _prompts_and_states(data, "prompt", True, name)
        # Lower case; line breaks inside the prompt stay, as for the released weights.
        words = [prompt.lower().strip().replace("_", " ") for prompt in prompts.flat]
        rows = [fast.text.encode(_task_and_state(*pair), bos=True) for pair in zip(words, states)]
        codes: list[list[int]] = [[] for _ in rows]
        if self.write_actions:
            codes = _codes(data, prompts.shape, fast, [OPENING] * prompts.size, name)
        return _with_tokens(data, prompts.shape, fast.max_len, rows, codes)


@dataclasses.dataclass(frozen=True)
class ExtractFASTActions:
    """Decode the chunk in the tokens that the model wrote; zeros and a warning if there is none."""

    prompt: FASTPrompt
    action_horizon: int
    action_dim: int

    def __call__(self, data: Data) -> Data:
        tokens = require_numbers(data, "actions", "ExtractFASTActions")
        shape = (self.action_horizon, self.action_dim)
        actions = np.zeros((*tokens.shape[:-1], *shape), dtype=np.float32)
        for index in np.ndindex(tokens.shape[:-1]):
            actions[index] = self.prompt.decode(tokens[index], *shape)
        return {**data, "actions": actions}


def _prompts_and_states(
    data: Data, key: str, with_state: bool, context: str
) -> tuple[np.ndarray, list[Any]]:
    """Return one prompt per sample, and the bins of its state; None for a prompt without state."""
    if with_state:
        require(data, "state", context)
    batch = np.shape(data["state"])[:-1] if "state" in data else None
    prompts = _texts(data, key, batch, context)
    if not with_state:
        return prompts, [None] * prompts.size
    return prompts, list(_merged(discretize_state(np.asarray(data["state"])), 1))


def _codes(
    data: Data, batch: tuple[int, ...], fast: FASTPrompt, openings: Sequence[str], context: str
) -> list[list[int]]:
    """Return the tokens of each sample's actions."""
    actions = np.asarray(require(data, "actions", context))
    if actions.shape[:-2] != batch:
        raise ValueError(
            f"{context}: 'actions' has shape {actions.shape}; expected the state's leading axes "
            f"{batch}, then horizon and action dim."
        )
    return [fast.encode(chunk, opening) for chunk, opening in zip(_merged(actions, 2), openings)]


def _texts(data: Data, key: str, batch: tuple[int, ...] | None, context: str) -> np.ndarray:
    """Return one text per sample: an array of str with the leading axes of the batch."""
    if data.get(key) is None:
        error = missing_key(key, data.keys() - {key}, context)
        also = ", or set a default_prompt" if key == "prompt" else ""
        raise type(error)(f'{error} Give "{key}" with the observation{also}.')
    given = data[key]
    # An array of numbers may be large: it is not made into Python objects to find that out.
    if isinstance(given, np.ndarray) and given.dtype.kind not in "OU":
        raise ValueError(f"{context}: the {key} is an array of {given.dtype}; expected a string.")
    texts = np.asarray(given, dtype=object)
    for text in texts.flat:
        if not isinstance(text, str):
            found = f"{len(text)} bytes" if isinstance(text, bytes) else repr(text)
            raise ValueError(f"{context}: the {key} is {found}; expected a string.")
    if batch is None:
        return texts
    try:
        return np.broadcast_to(texts, batch)
    except ValueError:
        raise ValueError(
            f"{context}: {key!r} has shape {texts.shape}; expected one string, or one for each "
            f"of the states' leading axes {batch}."
        ) from None


def _with_tokens(
    data: Data, batch: tuple[int, ...], max_len: int, *parts: Sequence[Sequence[int]]
) -> Data:
    """Replace the texts by one row of tokens per sample, padded with zeros, and by masks.

    The parts of a row are the prompt, what the model writes after it, and what it writes that the
    action expert does not attend to.
    """
    rows = [list(itertools.chain(*row)) for row in zip(*parts, strict=True)]
    tokens = np.zeros((len(rows), max_len), np.int32)
    for index, row in enumerate(_cut(rows, max_len, *_CUT_PROMPT)):
        tokens[index, : len(row)] = row
    ends = np.cumsum([[len(ids) for ids in part] for part in parts], axis=0)
    *after, padding = np.arange(max_len) >= ends[..., np.newaxis]
    found = {"tokenized_prompt": tokens, "tokenized_prompt_mask": ~padding}
    for name, written in zip(("token_loss_mask", "token_hidden_mask"), after):
        found[name] = written & ~padding
    if after:
        found["token_ar_mask"] = found["token_loss_mask"].astype(np.int32)
    rest = {key: value for key, value in data.items() if key not in TEXTS}
    return rest | {key: values.reshape(*batch, max_len) for key, values in found.items()}


def _merged(values: np.ndarray, num_axes: int) -> np.ndarray:
    """Merge all axes before the last `num_axes`."""
    return values.reshape(-1, *values.shape[-num_axes:])


def _cut(
    rows: Sequence[Sequence[int]],
    max_len: int,
    kind: str,
    advice: str,
    ends: Iterable[Sequence[int]] = itertools.repeat(()),
) -> list[list[int]]:
    """Return rows of at most `max_len` tokens, with a warning if some are cut before their ends."""
    whole = [[*row, *end] for row, end in zip(rows, ends)]
    longest = max(map(len, whole), default=0)
    if longest <= max_len:
        return whole
    warn_once(
        logger,
        f"{kind} truncated at {max_len}",
        "%d of %d %s are longer than the model's %d tokens (the longest has %d) and were cut "
        "at the end. %s",
        *(sum(len(row) > max_len for row in whole), len(whole), kind, max_len, longest, advice),
    )
    return [[*row[: max(0, max_len - len(end))], *end][:max_len] for row, end in zip(rows, ends)]
