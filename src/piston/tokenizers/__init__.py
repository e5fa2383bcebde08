"""Text and actions as numbers.

`TextTokenizer` is what a prompt needs of a tokenizer. `paligemma` reads the public vocabulary,
`bytes` needs no file, `fast` turns chunks of actions into codes and codes into chunks. How a prompt
is worded is the business of `piston.transforms.prompts`.

Constructors store where the files are; the files are read at first use. Pickling (as for the
loader's workers) carries the location, not what was read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class TextTokenizer(Protocol):
    """Sentences ↔ ids."""

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
        """Ids below this are in everyday use; from here on, action codes may take them."""
        ...

    def encode(self, text: str, bos: bool = False) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...
