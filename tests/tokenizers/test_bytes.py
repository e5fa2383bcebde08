import pickle

from hypothesis import given
from hypothesis import strategies as st

from piston.tokenizers.text import BytesTokenizer


@given(st.text(), st.booleans())
def test_text_comes_back(text: str, bos: bool) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text, bos=bos)
    assert tokenizer.decode(ids) == text
    assert (ids[:1] == [tokenizer.bos_id]) == bos
    assert all(3 <= index < tokenizer.vocab_size for index in ids[bos:])


@given(st.lists(st.integers(-5, 400)))
def test_any_ids_decode(ids: list[int]) -> None:
    assert isinstance(BytesTokenizer().decode(ids), str)


def test_numbers_are_as_documented() -> None:
    tokenizer = BytesTokenizer()
    assert tokenizer.encode("A\n", bos=True) == [2, 65 + 3, 10 + 3]
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([2, 68, 1, 0, 9999]) == "A"


def test_half_a_surrogate_pair_is_no_crash() -> None:
    assert BytesTokenizer().decode(BytesTokenizer().encode("a\ud800b")) == "a?b"


def test_pickles() -> None:
    assert pickle.loads(pickle.dumps(BytesTokenizer())) == BytesTokenizer()
