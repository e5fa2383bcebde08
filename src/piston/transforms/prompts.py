"""Prompts: where the sentence comes from, how it is worded for each model, and its tokens.

The wording of π0, π0.5 and π0-FAST is defined here only. The state must be normalised and not yet
padded.

Dims: s state, l prompt length, h horizon, a action dim; `*b` any leading batch axes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from piston.logs import warn_once
from piston.tokenizers.fast import OPENING, FASTPrompt
from piston.tokenizers.text import TextTokenizer
from piston.transforms import Data, missing_key, require, require_numbers

logger = logging.getLogger(__name__)

# The left edges of the 256 bins of a state's numbers.
_STATE_BINS = np.linspace(-1, 1, 256 + 1)[:-1]

_CUT_PROMPT = ("prompts", "Raise model.max_token_len, or shorten the prompt.")


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

    def text(self, tokenizer: TextTokenizer, text: str, kind: str) -> list[int]:
        """Return the tokens of a subtask or an answer. Raise ValueError if they are too many."""
        ids = tokenizer.encode(_clean(text))
        if len(ids) >= self.max_text_len:
            raise ValueError(
                f"The {kind} {text!r} has {len(ids)} tokens and an end token; the model keeps "
                f"{self.max_text_len}. Shorten it, or raise model.max_text_len."
            )
        return ids

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int] | None],
        actions: Sequence[Sequence[int]],
        max_prompt_len: int,
    ) -> dict[str, np.ndarray]:
        """Return the tokens of all rows behind their prompts, and their masks."""
        max_len, rows, hidden = max_prompt_len + self.max_text_len, [], []
        for prompt, text, codes in zip(prompts, texts, actions, strict=True):
            end = [TextTokenizer.eos_id] if text is not None and self.training else []
            rows.append([*prompt, *(text or ()), *end, *codes])
            hidden.append(len(rows[-1]) - len(end) - len(codes))
        if self.fast is not None:
            max_len += self.fast.max_len
        tokens, mask = _pad(rows, max_len)
        place = np.arange(max_len)
        written = mask & (place >= np.array([len(prompt) for prompt in prompts])[:, None])
        found = {
            "tokenized_prompt": tokens,
            "tokenized_prompt_mask": mask,
            "token_ar_mask": written.astype(np.int32),
        }
        if not self.training:
            return found
        is_hidden = mask & (place >= np.array(hidden)[:, None])
        return {**found, "token_loss_mask": written, "token_hidden_mask": is_hidden}


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
        response = self.response
        return (
            self
            if response is None
            else dataclasses.replace(self, response=response.for_inference())
        )

    def __call__(self, data: Data) -> Data:
        name, is_question = type(self).__name__, data.get("question") is not None
        if self.discrete_state_input and not is_question:
            require(data, "state", name)
        batch = np.shape(data["state"])[:-1] if "state" in data else None
        prompts = _texts(data, "question" if is_question else "prompt", batch, name)
        bins: Sequence[np.ndarray | None] = [None] * prompts.size
        if self.discrete_state_input and not is_question:
            bins = _merged(discretize_state(np.asarray(data["state"])), 1)  # type: ignore[assignment]
        if self.response is None:
            tokens, mask = _pad(self._prompts(prompts, bins, [""] * prompts.size), self.max_len)
            found = {"tokenized_prompt": tokens, "tokenized_prompt_mask": mask}
            return _with_tokens(data, prompts.shape, **found)
        texts = self._given(data, prompts.shape, is_question)
        writes = is_question or self.response.subtasks
        # In training a frame without a label has nothing to write.
        asked = [writes and (not self.response.training or one is not None) for one in texts]
        cue = "Answer: " if is_question else "Subtask: "
        rows = self._prompts(prompts, bins, [cue if one else "" for one in asked])
        rows = [row[: self.max_len] for row in rows]
        # The prompt of π0.5 ends with the opening of the actions, unless a subtask follows it.
        opened = [state is not None and not one for state, one in zip(bins, asked)]
        found = self.response(rows, texts, self._codes(data, opened), self.max_len)
        if not self.response.training:
            found["writes_text"] = np.array([writes and text is None for text in texts])
        return _with_tokens(data, prompts.shape, **found)

    def _prompts(
        self, prompts: np.ndarray, bins: Sequence[np.ndarray | None], cues: Sequence[str]
    ) -> list[list[int]]:
        """Return the tokens of each prompt; a cue behind it tells the model to write."""
        # A whole episode usually has one prompt.
        encode = functools.cache(self._prompt)
        return [
            encode(prompt, cue) if state is None else self._prompt(prompt, cue, state)
            for prompt, state, cue in zip(prompts.flat, bins, cues, strict=True)
        ]

    def _prompt(
        self, prompt: str, cue: str, bins: Int[np.ndarray, " s"] | None = None
    ) -> list[int]:
        encode = self.tokenizer.encode
        if cue == "Answer: ":
            ids = encode(f"Question: {_clean(prompt)}\n", bos=True)
        elif bins is None:
            ids = [*encode(_clean(prompt), bos=True), *encode("\n")]
        else:
            opening = "" if cue else OPENING
            ids = encode(_task_and_state(_clean(prompt), bins) + opening, bos=True)
        if not cue:
            return ids
        # What tells the model to write must not be cut off with the end of a long prompt.
        cue_ids = encode(cue)
        _warn_if_cut([[*ids, *cue_ids]], self.max_len, *_CUT_PROMPT)
        return [*ids[: max(0, self.max_len - len(cue_ids))], *cue_ids]

    def _given(
        self, data: Data, batch: tuple[int, ...], is_question: bool
    ) -> list[list[int] | None]:
        """Return the tokens of the text that each sample has; None for one without."""
        kind, response = "answer" if is_question else "subtask", self.response
        assert response is not None
        name = type(self).__name__
        if is_question and not response.max_text_len:
            raise ValueError(f"{name}: the model answers no questions: model.targets lacks text.")
        if data.get(kind) is None:
            return [None] * math.prod(batch)
        given = _texts(data, kind, batch, name)
        if not is_question and not response.subtasks and any(given.flat):
            raise ValueError(f"{name}: a subtask is given to a policy that has none. Leave it out.")
        encode = functools.cache(lambda text: response.text(self.tokenizer, text, kind))
        return [encode(text) if text.strip() else None for text in given.flat]

    def _codes(self, data: Data, opened: Sequence[bool]) -> list[list[int]]:
        """Return the FAST tokens of each sample's actions, if the model learns them."""
        fast = None if self.response is None else self.response.fast
        if fast is None or "actions" not in data:
            return [[] for _ in opened]
        chunks = _merged(np.asarray(data["actions"]), 2)
        codes = [fast.written(c, "" if one else OPENING) for c, one in zip(chunks, opened)]
        advice = "Raise model.max_fast_len."
        _warn_if_cut(codes, fast.max_len, "chunks of FAST tokens", advice)
        return [row[: fast.max_len] for row in codes]


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
        name, max_len = "TokenizeFASTInputs", self.prompt.max_len
        state = np.asarray(require(data, "state", name))
        batch = state.shape[:-1]
        prompts = _texts(data, "prompt", batch, name)
        chunks: Iterable[np.ndarray | None] = [None] * prompts.size
        if self.write_actions:
            actions = np.asarray(require(data, "actions", name))
            if actions.shape[:-2] != batch:
                raise ValueError(
                    f"{name}: 'actions' has shape {actions.shape}; expected the state's leading "
                    f"axes {batch}, then horizon and action dim."
                )
            chunks = _merged(actions, 2)
        # Lower case; line breaks inside the sentence stay, as for the released weights.
        words = [prompt.lower().strip().replace("_", " ") for prompt in prompts.flat]
        parts = [
            self.prompt.encode(_task_and_state(text, bins), chunk)
            for text, bins, chunk in zip(words, _merged(discretize_state(state), 1), chunks)
        ]
        tokens, mask = _pad([[*prefix, *actions] for prefix, actions in parts], max_len)
        starts = np.array([len(prefix) for prefix, _ in parts], dtype=np.int64)
        written = mask & (np.arange(max_len) >= starts[:, None])
        return _with_tokens(
            data,
            batch,
            tokenized_prompt=tokens,
            tokenized_prompt_mask=mask,
            token_ar_mask=written.astype(np.int32),
            token_loss_mask=written,
        )


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


def _with_tokens(data: Data, batch: tuple[int, ...], **rows: np.ndarray) -> Data:
    """Replace the texts by arrays that have one row per sample."""
    texts = ("prompt", "subtask", "question", "answer")
    rest = {key: value for key, value in data.items() if key not in texts}
    return rest | {key: row.reshape((*batch, *row.shape[1:])) for key, row in rows.items()}


def _merged(values: np.ndarray, num_axes: int) -> np.ndarray:
    """Merge all axes before the last `num_axes`."""
    return values.reshape(-1, *values.shape[-num_axes:])


def _pad(
    rows: Sequence[Sequence[int]], max_len: int
) -> tuple[Int32[np.ndarray, "n l"], Bool[np.ndarray, "n l"]]:
    """Return tokens padded with zeros or cut to `max_len`, and a mask of those that are real."""
    _warn_if_cut(rows, max_len, *_CUT_PROMPT)
    tokens = np.zeros((len(rows), max_len), dtype=np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row[:max_len]
    return tokens, np.arange(max_len) < np.array([len(row) for row in rows])[:, None]


def _warn_if_cut(rows: Sequence[Sequence[int]], max_len: int, what: str, advice: str) -> None:
    longest = max(map(len, rows), default=0)
    if longest > max_len:
        warn_once(
            logger,
            f"{what} truncated at {max_len}",
            "%d of %d %s are longer than the model's %d tokens (the longest has %d) and were cut "
            "at the end. %s",
            *(sum(len(row) > max_len for row in rows), len(rows), what, max_len, longest, advice),
        )
