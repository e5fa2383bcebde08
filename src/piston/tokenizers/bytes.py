"""The built-in tokenizer: one id per UTF-8 byte. Needs no file, for small models and tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

# 0 is padding, 1 ends, 2 begins: as in PaliGemma's vocabulary.
_NUM_SPECIAL = 3


@dataclasses.dataclass(frozen=True)
class BytesTokenizer:
    """Byte b is id b + 3."""

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
        """The text of the ids that are bytes: a model may give others, and broken UTF-8."""
        content = bytes(
            int(index) - _NUM_SPECIAL for index in ids if _NUM_SPECIAL <= index < self.vocab_size
        )
        return content.decode("utf-8", errors="replace")
