"""Tokenizers of text: PaliGemma's vocabulary, and UTF-8 bytes for small models and tests."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from piston.assets import resolve

PUBLIC_PALIGEMMA = "gs://big_vision/paligemma_tokenizer.model"
_NUM_SPECIAL = 3


class TextTokenizer(abc.ABC):
    """Text ↔ ids. The special ids are those of PaliGemma's vocabulary."""

    pad_id = 0
    eos_id = 1
    bos_id = 2
    # The first id that is hardly used by text; action codes may take ids from here on.
    num_text_ids: int

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int: ...

    @abc.abstractmethod
    def encode(self, text: str, bos: bool = False) -> list[int]: ...

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class BytesTokenizer(TextTokenizer):
    """One id per UTF-8 byte: byte b is id b + 3. Needs no file."""

    vocab_size = 256 + _NUM_SPECIAL
    num_text_ids = 256 + _NUM_SPECIAL

    def encode(self, text: str, bos: bool = False) -> list[int]:
        # What UTF-8 cannot hold (half a surrogate pair) becomes "?".
        ids = [byte + _NUM_SPECIAL for byte in text.encode("utf-8", errors="replace")]
        return [self.bos_id, *ids] if bos else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids that are bytes; a model may write others, or broken UTF-8."""
        known = (int(index) for index in ids if _NUM_SPECIAL <= index < self.vocab_size)
        return bytes(index - _NUM_SPECIAL for index in known).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class PaligemmaTokenizer(TextTokenizer):
    """PaliGemma's 257,152 SentencePiece pieces: text, then 1,024 `<loc>` and 128 `<seg>` pieces."""

    location: str = PUBLIC_PALIGEMMA

    # Words, digits, punctuation and common letters are below, rare characters above.
    num_text_ids = 240_000

    @property
    def vocab_size(self) -> int:
        return self._processor.vocab_size()

    def encode(self, text: str, bos: bool = False) -> list[int]:
        return self._processor.encode(text, add_bos=bos)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(index) for index in ids])

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        path = resolve(self.location)
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
            ids = (processor.pad_id(), processor.eos_id(), processor.bos_id())
            if ids != (self.pad_id, self.eos_id, self.bos_id):
                raise RuntimeError(f"its ids of padding, end and beginning are {ids}")
        except RuntimeError as error:
            raise ValueError(
                f"{path} is not PaliGemma's SentencePiece vocabulary ({error}). Expected the file "
                f"at {PUBLIC_PALIGEMMA}; remove a broken download and fetch it again."
            ) from error
        return processor

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location}
