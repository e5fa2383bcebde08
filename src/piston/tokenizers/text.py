"""Tokenizers of text: PaliGemma's vocabulary, and UTF-8 bytes for small models and tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Protocol

from piston.assets import resolve

PUBLIC_PALIGEMMA = "gs://big_vision/paligemma_tokenizer.model"
# 0 is padding, 1 ends, 2 begins, as in PaliGemma's vocabulary.
_NUM_SPECIAL = 3


class TextTokenizer(Protocol):
    """Text ↔ ids."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int: ...

    @property
    def eos_id(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def num_text_ids(self) -> int:
        """The first id that is hardly used by text; action codes may take ids from here on."""
        ...

    def encode(self, text: str, bos: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class BytesTokenizer:
    """One id per UTF-8 byte: byte b is id b + 3. Needs no file."""

    pad_id = 0
    eos_id = 1
    bos_id = 2
    vocab_size = 256 + _NUM_SPECIAL
    num_text_ids = 256 + _NUM_SPECIAL

    def encode(self, text: str, bos: bool = False) -> list[int]:
        # What UTF-8 cannot hold (half a surrogate pair) becomes "?".
        ids = [byte + _NUM_SPECIAL for byte in text.encode("utf-8", errors="replace")]
        return [self.bos_id, *ids] if bos else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids that are bytes; a model may write others, or broken UTF-8."""
        content = bytes(
            int(index) - _NUM_SPECIAL for index in ids if _NUM_SPECIAL <= index < self.vocab_size
        )
        return content.decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class PaligemmaTokenizer:
    """PaliGemma's 257,152 SentencePiece pieces: text, then 1,024 `<loc>` and 128 `<seg>` pieces."""

    location: str = PUBLIC_PALIGEMMA

    @property
    def vocab_size(self) -> int:
        return self._processor.vocab_size()

    @property
    def bos_id(self) -> int:
        return self._processor.bos_id()

    @property
    def eos_id(self) -> int:
        return self._processor.eos_id()

    @property
    def pad_id(self) -> int:
        return self._processor.pad_id()

    @property
    def num_text_ids(self) -> int:
        # Words, digits, punctuation and common letters are below, rare characters above.
        return 240_000

    def encode(self, text: str, bos: bool = False) -> list[int]:
        return self._processor.encode(text, add_bos=bos)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(index) for index in ids])

    @functools.cached_property
    def _processor(self) -> Any:
        import sentencepiece

        path = resolve(self.location)
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except RuntimeError as error:
            raise ValueError(
                f"{path} is not a SentencePiece vocabulary ({error}). Expected PaliGemma's file, "
                f"as at {PUBLIC_PALIGEMMA}; remove a broken download and fetch it again."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location}
