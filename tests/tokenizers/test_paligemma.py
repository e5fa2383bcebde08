import json
import pickle
from pathlib import Path

import pytest

from piston.tokenizers.text import PaligemmaTokenizer


@pytest.fixture(scope="module")
def paligemma(reference: Path) -> PaligemmaTokenizer:
    return PaligemmaTokenizer(str(reference / "tokenizers" / "paligemma_tokenizer.model"))


def test_published_ids(paligemma: PaligemmaTokenizer, reference: Path) -> None:
    published = json.loads((reference / "tokenizers" / "published_prompts.json").read_text())
    for text, ids in published["pairs"]:
        assert paligemma.encode(text, bos=True) == ids
        assert paligemma.encode(text) == ids[1:]
        assert paligemma.decode(ids) == text


def test_special_ids(paligemma: PaligemmaTokenizer) -> None:
    assert paligemma.vocab_size == 257_152
    assert (paligemma.pad_id, paligemma.eos_id, paligemma.bos_id) == (0, 1, 2)
    frame = "Task: State: 0123456789-;\nAction: |"
    assert max(paligemma.encode(frame)) < paligemma.num_text_ids < paligemma.vocab_size - 128


def test_pickle_carries_the_location_only(paligemma: PaligemmaTokenizer) -> None:
    paligemma.encode("read the file")
    pickled = pickle.dumps(paligemma)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).encode("fork") == paligemma.encode("fork")


def test_nothing_is_read_until_needed(tmp_path: Path) -> None:
    tokenizer = PaligemmaTokenizer(str(tmp_path / "absent.model"))
    with pytest.raises(FileNotFoundError, match=r"absent\.model"):
        tokenizer.encode("now")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "half.model").write_bytes(b"not a vocabulary")
    with pytest.raises(ValueError, match=r"half\.model"):
        PaligemmaTokenizer(str(tmp_path / "half.model")).encode("now")
