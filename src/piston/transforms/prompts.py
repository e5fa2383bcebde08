"""Prompts: where the sentence comes from, how it is worded for each model, and its tokens.

The wording of π0, π0.5 and π0-FAST is defined here only. The state must be normalised and not yet
padded.

Dims: s state, l prompt length, h horizon, a action dim; `*b` any leading batch axes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from piston.logs import warn_once
from piston.tokenizers.fast import FASTPrompt
from piston.tokenizers.text import TextTokenizer
from piston.transforms import Data, missing_key, require, require_numbers

logger = logging.getLogger(__name__)

# The left edges of the 256 bins of a state's numbers.
_STATE_BINS = np.linspace(-1, 1, 256 + 1)[:-1]


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
class TokenizePrompt:
    """Replace the prompt by its tokens, for a flow model.

    π0     BOS, the sentence, then "\\n" encoded by itself.
    π0.5   (`discrete_state_input`) BOS, then the sentence and the state in one text.
    """

    tokenizer: TextTokenizer
    max_len: int
    discrete_state_input: bool = False

    def __call__(self, data: Data) -> Data:
        encode = self.tokenizer.encode
        if self.discrete_state_input:
            state = np.asarray(require(data, "state", "TokenizePrompt"))
            prompts = _prompts(data, state.shape[:-1], "TokenizePrompt")
            rows = [
                encode(_task_and_state(_clean(prompt), bins) + "Action: ", bos=True)
                for prompt, bins in zip(prompts.flat, _merged(discretize_state(state), 1))
            ]
        else:
            batch = np.shape(data["state"])[:-1] if "state" in data else None
            prompts = _prompts(data, batch, "TokenizePrompt")
            # A whole episode usually has one prompt.
            known = {p: [*encode(_clean(p), bos=True), *encode("\n")] for p in set(prompts.flat)}
            rows = [known[prompt] for prompt in prompts.flat]
        tokens, mask = _pad(rows, self.max_len)
        return _with_tokens(
            data, prompts.shape, tokenized_prompt=tokens, tokenized_prompt_mask=mask
        )


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
        prompts = _prompts(data, batch, name)
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


def _prompts(data: Data, batch: tuple[int, ...] | None, context: str) -> np.ndarray:
    """Return one prompt per sample: an array of str with the leading axes of the batch."""
    if data.get("prompt") is None:
        error = missing_key("prompt", data.keys() - {"prompt"}, context)
        raise type(error)(f'{error} Give "prompt" with the observation, or set a default_prompt.')
    given = data["prompt"]
    # An array of numbers may be large: it is not made into Python objects to find that out.
    if isinstance(given, np.ndarray) and given.dtype.kind not in "OU":
        raise ValueError(f"{context}: the prompt is an array of {given.dtype}; expected a string.")
    prompts = np.asarray(given, dtype=object)
    for prompt in prompts.flat:
        if not isinstance(prompt, str):
            is_bytes = isinstance(prompt, bytes)
            found = f"{len(prompt)} bytes" if is_bytes else repr(prompt)
            raise ValueError(f"{context}: the prompt is {found}; expected a string.")
    if batch is None:
        return prompts
    try:
        return np.broadcast_to(prompts, batch)
    except ValueError:
        raise ValueError(
            f"{context}: 'prompt' has shape {prompts.shape}; expected one string, or one for each "
            f"of the states' leading axes {batch}."
        ) from None


def _with_tokens(data: Data, batch: tuple[int, ...], **rows: np.ndarray) -> Data:
    """Replace the prompt by arrays that have one row per sample."""
    rest = {key: value for key, value in data.items() if key != "prompt"}
    return rest | {key: row.reshape(*batch, row.shape[-1]) for key, row in rows.items()}


def _merged(values: np.ndarray, num_axes: int) -> np.ndarray:
    """Merge all axes before the last `num_axes`."""
    return values.reshape(-1, *values.shape[-num_axes:])


def _pad(
    rows: Sequence[Sequence[int]], max_len: int
) -> tuple[Int32[np.ndarray, "n l"], Bool[np.ndarray, "n l"]]:
    """Return tokens padded with zeros or cut to `max_len`, and a mask of those that are real."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if (lengths > max_len).any():
        warn_once(
            logger,
            f"truncated at {max_len}",
            "%d of %d prompts are longer than the model's %d tokens (the longest has %d) and were "
            "cut at the end. Raise model.max_token_len, or shorten the prompt.",
            *((lengths > max_len).sum(), len(rows), max_len, lengths.max()),
        )
    tokens = np.zeros((len(rows), max_len), dtype=np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row[:max_len]
    return tokens, np.arange(max_len) < lengths[:, None]
