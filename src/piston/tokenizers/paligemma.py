"""PaliGemma's SentencePiece vocabulary, as π0, π0.5 and π0-FAST use it.

Knows where the public file is and reads it at first use; knows nothing of prompts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from piston.assets import resolve

PUBLIC_PALIGEMMA = "gs://big_vision/paligemma_tokenizer.model"


@dataclasses.dataclass(frozen=True)
class PaligemmaTokenizer:
    """257,152 pieces: text, then 1,024 `<loc>` and 128 `<seg>` pieces."""

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
        # Words, digits, punctuation and the usual letters stand below; then rare characters.
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
                f"as at {PUBLIC_PALIGEMMA}; a broken download must be removed and fetched again."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location}
