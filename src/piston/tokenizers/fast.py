"""FAST: a chunk of actions as a short list of codes, and the tokens that a model writes for it.

`FASTTokenizer`   chunk (h, d) → DCT over time → × scale, rounded → characters → byte-level BPE.
`FASTPrompt`      those codes as ids of the model's vocabulary, between `Action: ` and `|`.

The files have the layout of the public tokenizer (`tokenizer.json`, `processor_config.json`).
`piston.transforms.prompts` defines the text before the actions.

Dims: h horizon, d action dim, k frequency.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from piston.assets import resolve
from piston.files import read_json_object, write_text
from piston.logs import warn_once
from piston.tokenizers.text import TextTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

logger = logging.getLogger(__name__)

PUBLIC_FAST = "hf://physical-intelligence/fast"
# The last ids of PaliGemma's vocabulary are `<seg>` pieces; action codes come before them.
NUM_SKIPPED_IDS = 128
# The text before the codes of a chunk.
OPENING = "Action: "
# The name of a tokenizer that is built in and needs no file: for small models.
BUILT_IN = "bytes"

# Characters from here on are halves of surrogate pairs, which UTF-8 cannot hold.
_NUM_CHARACTERS = 0xD800
# What a byte-level decoder writes for bytes that are not a character.
_BROKEN = "\ufffd"
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
# Where transformers finds the class that reads a saved folder.
_CLASS = "UniversalActionProcessor"
_PROCESSOR = {
    "auto_map": {
        "AutoProcessor": f"physical-intelligence/fast--processing_action_tokenizer.{_CLASS}"
    },
    "processor_class": _CLASS,
}


@dataclasses.dataclass(frozen=True)
class FASTFiles:
    """What the tokenizer's folder holds."""

    # The content of tokenizer.json.
    bpe: str = dataclasses.field(repr=False)
    scale: float
    min_token: int
    # The shape that the tokenizer was fitted to, where there is one.
    time_horizon: int | None = None
    action_dim: int | None = None

    @classmethod
    def read(cls, folder: Path) -> FASTFiles:
        bpe, config = paths = (folder / "tokenizer.json", folder / "processor_config.json")
        if missing := [path.name for path in paths if not path.is_file()]:
            raise FileNotFoundError(
                f"{' and '.join(missing)} missing in {folder}. A FAST tokenizer's folder holds "
                f"tokenizer.json and processor_config.json, as {PUBLIC_FAST} does."
            )
        found = read_json_object(config)
        if absent := [key for key in ("scale", "min_token") if found.get(key) is None]:
            raise ValueError(f"{config} lacks {', '.join(absent)}; it has {sorted(found)}.")
        names = [field.name for field in dataclasses.fields(cls) if field.name in found]
        return cls(bpe=bpe.read_text("utf-8"), **{name: found[name] for name in names})


@dataclasses.dataclass(frozen=True)
class FASTTokenizer:
    """Chunks ↔ codes. `source` is a folder or location, read at first use, or the content.

    The source "bytes" is built in: one code per coefficient of usual size, as nothing was fitted.
    """

    source: str | FASTFiles = PUBLIC_FAST

    @classmethod
    def fit(
        cls,
        chunks: Float[np.ndarray, "... h d"] | Iterable[Float[np.ndarray, "h d"]],
        vocab_size: int = 1024,
        scale: float = 10,
    ) -> FASTTokenizer:
        """Fit a tokenizer to chunks that are normalised as for the model.

        A larger scale rounds less and needs more codes per chunk.
        """
        if vocab_size < len(_BYTES):
            raise ValueError(
                f"vocab_size must be at least {len(_BYTES)}, one code per byte, is {vocab_size}."
            )
        if isinstance(chunks, np.ndarray):
            chunks = chunks.reshape(-1, *chunks.shape[-2:])
        coefficients = [_quantize(chunk, scale) for chunk in chunks]
        if not coefficients:
            raise ValueError("There are no chunks to fit a FAST tokenizer to.")
        lowest = min(int(c.min()) for c in coefficients)
        highest = max(int(c.max()) for c in coefficients)
        # Room below, since other data reach further than those fitted to.
        min_token = lowest - (highest - lowest) // 2 - 1
        bpe = _byte_level()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            # All bytes, seen or not, so that every chunk can be encoded.
            initial_alphabet=_BYTES,
            # Longer than any chunk: the trainer's own limit would prevent merges.
            max_token_length=10_000,
        )
        bpe.train_from_iterator([_as_text(c, min_token) for c in coefficients], trainer=trainer)
        sizes = [{c.shape[axis] for c in coefficients} for axis in (0, 1)]
        horizon, dim = (size.pop() if len(size) == 1 else None for size in sizes)
        return cls(FASTFiles(bpe.to_str(pretty=True), scale, min_token, horizon, dim))

    def save(self, folder: str | Path) -> None:
        """Write the layout of the public tokenizer."""
        settings = dataclasses.asdict(self.files) | {"vocab_size": self.vocab_size}
        write_text(Path(folder) / "tokenizer.json", settings.pop("bpe"))
        contents: dict[str, dict[str, Any]] = {
            "processor_config.json": {**_PROCESSOR, **settings},
            "special_tokens_map.json": {},
            "tokenizer_config.json": {
                **_PROCESSOR,
                "added_tokens_decoder": {},
                # Some coefficients are spaces and full stops: they must come back as they were.
                "clean_up_tokenization_spaces": False,
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
        }
        for name, content in contents.items():
            text = json.dumps(content, indent=2, sort_keys=True)
            write_text(Path(folder) / name, text + "\n")

    @property
    def vocab_size(self) -> int:
        return self._bpe.get_vocab_size()

    def encode(self, chunk: Float[np.ndarray, "... h d"]) -> list[Any]:
        """Return the codes of a chunk (h, d), in nested lists for leading axes."""
        chunk = np.asarray(chunk, dtype=np.float64)
        if chunk.ndim > 2:
            return [self.encode(part) for part in chunk]
        text = _as_text(_quantize(chunk, self.files.scale), self.files.min_token)
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(
        self, codes: Sequence[int] | Int[np.ndarray, " n"], horizon: int, action_dim: int
    ) -> Float[np.ndarray, "h d"]:
        """Return the chunk of these codes, or zeros and a warning if they are not such a chunk."""
        codes = [int(code) for code in codes]
        outside = [code for code in codes if not 0 <= code < self.vocab_size]
        text = "" if outside else self._bpe.decode(codes)
        if outside:
            kind, last = "outside the vocabulary", self.vocab_size - 1
            found = f"{len(outside)} codes lie outside 0 … {last} (the first: {outside[0]})"
        elif _BROKEN in text:
            kind = "broken characters"
            found = f"{text.count(_BROKEN)} of {len(text)} coefficients are broken characters"
        elif len(text) != horizon * action_dim:
            kind, expected = "wrong length", f"{horizon} × {action_dim} = {horizon * action_dim}"
            found = f"{len(codes)} codes hold {len(text)} coefficients, expected {expected}"
        else:
            characters = np.array([ord(character) for character in text], dtype=np.float64)
            coefficients = (characters + self.files.min_token).reshape(horizon, action_dim)
            return _dct_matrix(horizon).T @ (coefficients / self.files.scale)
        _warn_malformed(kind, found)
        return np.zeros((horizon, action_dim))

    @functools.cached_property
    def files(self) -> FASTFiles:
        if isinstance(self.source, FASTFiles):
            return self.source
        if self.source == BUILT_IN:
            # Coefficients from −64 to 63, almost all of normalised actions, are one byte each.
            return FASTFiles(_byte_level().to_str(), scale=10, min_token=-64)
        return FASTFiles.read(resolve(self.source))

    @functools.cached_property
    def _bpe(self) -> Tokenizer:
        return Tokenizer.from_str(self.files.bpe)

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source}


@dataclasses.dataclass(frozen=True)
class FASTPrompt:
    """A chunk as tokens of a model: `Action: ` codes `|<eos>`.

    Code c is id `vocab_size − 1 − 128 − c` of the model. In PaliGemma's vocabulary these ids are
    `<loc>` pieces and rare characters. With a smaller text tokenizer no text may use them:
    `vocab_size` must be at least the text's ids + the codes + 128.
    """

    text: TextTokenizer
    fast: FASTTokenizer
    # The model's.
    vocab_size: int
    # Tokens of a chunk, for π0-FAST together with those of the prompt; the rest is cut.
    max_len: int

    def encode(self, chunk: Float[np.ndarray, "h d"], opening: str = OPENING) -> list[int]:
        """Return the tokens of a chunk, with what begins and ends it."""
        codes = [self._first_id - code for code in self.fast.encode(chunk)]
        return [*self.text.encode(opening), *codes, *self.text.encode("|"), self.text.eos_id]

    def decode(
        self, tokens: Sequence[int] | Int[np.ndarray, " n"], horizon: int, action_dim: int
    ) -> Float[np.ndarray, "h d"]:
        """Return the chunk in what the model wrote, or zeros and a warning if there is none."""
        ids = [int(token) for token in tokens]
        opening, closing = map(self.text.encode, (OPENING, "|"))
        start = _find(ids, opening)
        if start is None:
            _warn_malformed("no opening", f"no 'Action: ' in {len(ids)} tokens ({ids[:8]} …)")
            return np.zeros((horizon, action_dim))
        ids = ids[start + len(opening) :]
        # Without an end the tokens ran out; they may still hold a whole chunk.
        ends = (_find(ids, end) for end in (closing, [self.text.eos_id], [self.text.pad_id]))
        ids = ids[: min((end for end in ends if end is not None), default=len(ids))]
        return self.fast.decode([self._first_id - index for index in ids], horizon, action_dim)

    def describe(self, index: int) -> str:
        """Return what a token of the model stands for, for people to read."""
        code = self._first_id - index
        if 0 <= code < self.fast.vocab_size:
            return f"code {code}"
        special = {self.text.pad_id: "<pad>", self.text.eos_id: "<eos>", self.text.bos_id: "<bos>"}
        return special.get(index) or self.text.decode([index])

    @functools.cached_property
    def _first_id(self) -> int:
        """Return the id of code 0; codes count down from it."""
        num_codes, num_text_ids = self.fast.vocab_size, self.text.num_text_ids
        if self.vocab_size - NUM_SKIPPED_IDS - num_codes < num_text_ids:
            raise ValueError(
                f"The model's vocabulary of {self.vocab_size} ids has no room for {num_codes} FAST "
                f"codes beside the text: {type(self.text).__name__} uses {num_text_ids} ids, and "
                f"the last {NUM_SKIPPED_IDS} are skipped. Set model.vocab_size to at least "
                f"{num_text_ids + num_codes + NUM_SKIPPED_IDS}, or fit a smaller FAST tokenizer."
            )
        return self.vocab_size - 1 - NUM_SKIPPED_IDS


def _byte_level() -> Tokenizer:
    """Return a BPE tokenizer that has a code for each byte and no merges yet."""
    bpe = Tokenizer(models.BPE(vocab={byte: code for code, byte in enumerate(_BYTES)}, merges=[]))
    # Characters stand for numbers, so text is not split into words.
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


@functools.lru_cache(maxsize=32)
def _dct_matrix(horizon: int) -> Float[np.ndarray, "k h"]:
    """Return the orthonormal DCT-II, whose transpose is its inverse."""
    frequency, time = np.ogrid[:horizon, :horizon]
    matrix = np.sqrt(2 / horizon) * np.cos(np.pi * frequency * (2 * time + 1) / (2 * horizon))
    matrix[0] = np.sqrt(1 / horizon)
    matrix.setflags(write=False)
    return matrix


def _quantize(chunk: Float[np.ndarray, "h d"], scale: float) -> Int[np.ndarray, "k d"]:
    chunk = np.asarray(chunk, dtype=np.float64)
    if chunk.ndim != 2 or not chunk.size:
        raise ValueError(f"A chunk of actions is (horizon, action dim), found shape {chunk.shape}.")
    if not np.isfinite(chunk).all():
        step, dim = np.argwhere(~np.isfinite(chunk))[0]
        raise ValueError(
            f"The chunk of actions holds {chunk[step, dim]} at step {step}, dimension {dim}. "
            "Expected finite numbers: check the data and the normalisation statistics."
        )
    return np.around(_dct_matrix(len(chunk)) @ chunk * scale).astype(np.int64)


def _as_text(coefficients: Int[np.ndarray, "k d"], min_token: int) -> str:
    characters = coefficients - min_token
    outside = np.argwhere((characters < 0) | (characters >= _NUM_CHARACTERS))
    if len(outside):
        # The public tokenizer clips as well, without a warning.
        frequency, dim = outside[0]
        warn_once(
            logger,
            "coefficient out of range",
            "A FAST coefficient of action dimension %d is %d, outside %d … %d, and was clipped. "
            "The actions must be normalised to about [−1, 1]: check that dimension's statistics, "
            "or fit a FAST tokenizer to these data.",
            *(dim, coefficients[frequency, dim], min_token, min_token + _NUM_CHARACTERS - 1),
        )
        characters = np.clip(characters, 0, _NUM_CHARACTERS - 1)
    return "".join(map(chr, characters.ravel()))


def _find(ids: list[int], part: list[int]) -> int | None:
    starts = range(len(ids) - len(part) + 1)
    return next((start for start in starts if ids[start : start + len(part)] == part), None)


def _warn_malformed(kind: str, found: str) -> None:
    """Warn once per kind: a policy may write malformed actions many times a second."""
    warn_once(logger, kind, "Malformed FAST actions: %s. Returned zeros.", found)
