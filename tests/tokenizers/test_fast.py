import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piston.logs import forget_warnings
from piston.tokenizers.fast import FASTPrompt, FASTTokenizer
from piston.tokenizers.text import BytesTokenizer

SCALE = 10
HORIZON, DIM = 12, 5


def smooth_chunks(num: int, horizon: int, dim: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    steps = rng.normal(scale=0.1, size=(num, horizon, dim))
    return rng.uniform(-0.5, 0.5, size=(num, 1, dim)) + steps.cumsum(axis=1)


@pytest.fixture(scope="module")
def public(reference: Path) -> FASTTokenizer:
    return FASTTokenizer(str(reference / "tokenizers" / "fast"))


@pytest.fixture(scope="module")
def cases(small_reference: Path) -> list[dict[str, Any]]:
    return json.loads((small_reference / "transforms.json").read_text())["fast"]


@pytest.fixture(scope="module")
def fitted() -> FASTTokenizer:
    return FASTTokenizer.fit(smooth_chunks(200, HORIZON, DIM), vocab_size=512, scale=SCALE)


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    forget_warnings()


def test_reference_codes_and_chunks(public: FASTTokenizer, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        codes = public.encode(np.array(case["actions"]))
        assert codes == case["fast_tokens"]
        decoded = public.decode(codes, case["horizon"], case["dim"])
        np.testing.assert_allclose(decoded, case["decoded"], atol=1e-6)


def test_fitted_reconstructs_within_rounding(fitted: FASTTokenizer) -> None:
    for chunk in smooth_chunks(50, HORIZON, DIM, seed=1):
        codes = fitted.encode(chunk)
        decoded = fitted.decode(codes, HORIZON, DIM)
        # The DCT keeps lengths: half a step of rounding in each coefficient, no more.
        assert np.linalg.norm(decoded - chunk, axis=0).max() <= 0.5 / SCALE * np.sqrt(HORIZON)
        assert len(codes) < chunk.size


def test_the_built_in_tokenizer_needs_no_file(caplog: pytest.LogCaptureFixture) -> None:
    built_in = FASTTokenizer("bytes")
    assert built_in.vocab_size == 256
    assert pickle.loads(pickle.dumps(built_in)) == built_in
    for horizon, dim in ((1, 1), (HORIZON, DIM), (50, 14)):
        chunk = np.random.default_rng(horizon).uniform(-1, 1, (horizon, dim))
        codes = built_in.encode(chunk)
        assert len(codes) == chunk.size  # a byte per coefficient
        decoded = built_in.decode(codes, horizon, dim)
        assert np.linalg.norm(decoded - chunk, axis=0).max() <= 0.05 * np.sqrt(horizon) + 1e-9
    # A coefficient above the usual size takes two codes; one below all is clipped.
    large = np.array([[9.0], [9.0]])
    assert len(built_in.encode(large)) == 3
    np.testing.assert_allclose(built_in.decode(built_in.encode(large), 2, 1), large, atol=0.1)
    assert not caplog.records
    low = built_in.decode(built_in.encode(-large), 2, 1)
    assert "is -127, outside -64 …" in caplog.text
    np.testing.assert_allclose(low, -6.4 / np.sqrt(2), atol=0.05)


def test_fit_is_for_any_shape_and_repeats() -> None:
    chunks = smooth_chunks(24, HORIZON, DIM)
    batched = FASTTokenizer.fit(chunks.reshape(2, 3, 4, HORIZON, DIM), vocab_size=300)
    assert batched == FASTTokenizer.fit(list(chunks), vocab_size=300)
    mixed = FASTTokenizer.fit([chunks[0], chunks[1][:5]], vocab_size=256)
    assert (mixed.files.time_horizon, mixed.files.action_dim) == (None, DIM)
    assert mixed.vocab_size == 256


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_was_never_seen_still_comes_back(fitted: FASTTokenizer, data: st.DataObject) -> None:
    horizon, dim = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 9))
    values = st.floats(-0.5, 100, allow_nan=False)
    flat = data.draw(st.lists(values, min_size=horizon * dim, max_size=horizon * dim))
    # The mean may be anything, the swing stays within what the tokenizer's range has room for.
    chunk = 0.2 * np.sin(np.reshape(flat, (horizon, dim))) + abs(flat[0])
    decoded = fitted.decode(fitted.encode(chunk), horizon, dim)
    assert np.abs(decoded - chunk).max() <= 0.5 / SCALE * np.sqrt(horizon) + 1e-9


def test_saved_files_load_as_the_public_ones_do(
    fitted: FASTTokenizer, public: FASTTokenizer, reference: Path, tmp_path: Path
) -> None:
    chunk = smooth_chunks(1, HORIZON, DIM, seed=3)[0]
    for name, tokenizer in {"fitted": fitted, "public": public}.items():
        tokenizer.save(tmp_path / name)
        loaded = FASTTokenizer(str(tmp_path / name))
        assert loaded.files == tokenizer.files
        assert loaded.vocab_size == tokenizer.vocab_size
        assert loaded.encode(chunk) == tokenizer.encode(chunk)
        public_folder = reference / "tokenizers" / "fast"
        assert {p.name for p in (tmp_path / name).iterdir()} == {
            p.name for p in public_folder.iterdir()
        }
        ours = json.loads((tmp_path / name / "processor_config.json").read_text())
        theirs = json.loads((public_folder / "processor_config.json").read_text())
        assert ours.keys() == theirs.keys()
        if name == "public":
            assert {**ours, "auto_map": None} == {**theirs, "auto_map": None}


def test_fitted_round_trip_through_files(fitted: FASTTokenizer, tmp_path: Path) -> None:
    fitted.save(tmp_path / "fast")
    loaded = FASTTokenizer(str(tmp_path / "fast"))
    chunks = smooth_chunks(4, HORIZON, DIM, seed=4)
    assert loaded.files == fitted.files
    assert loaded.encode(chunks) == [fitted.encode(chunk) for chunk in chunks]
    settings_file = json.loads((tmp_path / "fast" / "processor_config.json").read_text())
    assert settings_file["time_horizon"] == HORIZON
    assert settings_file["vocab_size"] == fitted.vocab_size <= 512


def test_leading_axes_give_nested_lists(fitted: FASTTokenizer) -> None:
    chunks = smooth_chunks(6, HORIZON, DIM)
    expected = [fitted.encode(chunk) for chunk in chunks]
    assert fitted.encode(chunks.reshape(2, 3, HORIZON, DIM)) == [expected[:3], expected[3:]]


def test_malformed_codes_are_zeros_and_one_warning_per_kind(
    fitted: FASTTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    codes = fitted.encode(smooth_chunks(1, HORIZON, DIM)[0])
    lead_byte = json.loads(fitted.files.bpe)["model"]["vocab"]["Ä"]  # a byte that begins a pair
    malformed = {
        "coefficients, expected 12 × 5 = 60": [codes[:-1], [], [*codes, 0], codes * 3],
        "outside 0 … ": [[*codes, fitted.vocab_size], [-1], [10**9]],
        "broken characters": [[lead_byte] * 60, [*codes, lead_byte]],
    }
    for reason, examples in malformed.items():
        caplog.clear()
        for example in examples * 2:
            decoded = fitted.decode(example, HORIZON, DIM)
            assert decoded.shape == (HORIZON, DIM)
            assert not decoded.any()
        assert len(caplog.records) == 1
        assert reason in caplog.text


@settings(max_examples=200, deadline=None)
@given(codes=st.lists(st.integers(-10, 600), max_size=80))
def test_no_codes_crash(fitted: FASTTokenizer, codes: list[int]) -> None:
    decoded = fitted.decode(np.array(codes, dtype=np.int32), 4, 3)
    assert decoded.shape == (4, 3)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (np.full((3, 2), np.nan), "step 0, dimension 0"),
        (np.zeros(5), r"shape \(5,\)"),
        (np.zeros((0, 5)), r"shape \(0, 5\)"),
    ],
)
def test_what_cannot_be_encoded_is_refused(
    fitted: FASTTokenizer, chunk: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fitted.encode(chunk)


@pytest.mark.parametrize(
    ("value", "found"), [(-1e3, "dimension 1 is -10000"), (1e5, "dimension 1 is 1000000")]
)
def test_actions_far_out_of_range_are_clipped_with_a_warning(
    fitted: FASTTokenizer, value: float, found: str, caplog
) -> None:
    codes = fitted.encode(np.array([[0.0, value]]))
    assert fitted.encode(np.array([[0.0, 10 * value]])) == codes
    assert found in caplog.text
    assert caplog.text.count("logged once") == 1


def test_bad_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 256"):
        FASTTokenizer.fit(smooth_chunks(3, 4, 2), vocab_size=100)
    with pytest.raises(ValueError, match="no chunks"):
        FASTTokenizer.fit([])


def test_bad_folders_are_named(tmp_path: Path, fitted: FASTTokenizer) -> None:
    fitted.save(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"scale": 10}')
    with pytest.raises(ValueError, match="lacks min_token"):
        FASTTokenizer(str(tmp_path)).encode(np.zeros((2, 2)))
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"processor_config\.json missing"):
        FASTTokenizer(str(tmp_path)).encode(np.zeros((2, 2)))


def test_pickling(fitted: FASTTokenizer, tmp_path: Path) -> None:
    chunk = smooth_chunks(1, HORIZON, DIM)[0]
    fitted.save(tmp_path)
    loaded = FASTTokenizer(str(tmp_path))
    loaded.encode(chunk)
    assert len(pickle.dumps(loaded)) < 1000
    for tokenizer in (loaded, fitted):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy == tokenizer
        assert copy.encode(chunk) == tokenizer.encode(chunk)


class TestPrompt:
    @pytest.fixture
    def prompt(self, fitted: FASTTokenizer) -> FASTPrompt:
        vocab_size = 259 + fitted.vocab_size + 128
        return FASTPrompt(BytesTokenizer(), fitted, vocab_size=vocab_size, max_len=200)

    @pytest.fixture
    def chunk(self) -> np.ndarray:
        return smooth_chunks(1, HORIZON, DIM, seed=7)[0]

    def test_layout(self, prompt: FASTPrompt, chunk: np.ndarray) -> None:
        text = BytesTokenizer()
        written = prompt.encode(chunk)
        codes = [prompt.vocab_size - 129 - code for code in prompt.fast.encode(chunk)]
        assert written == [*text.encode("Action: "), *codes, *text.encode("|"), text.eos_id]
        assert min(codes) >= text.vocab_size
        assert prompt.encode(chunk, "") == written[len(text.encode("Action: ")) :]

    @pytest.mark.parametrize("after", [[], [0, 0, 0], [1, 0, 300], [127, 1, 0, 68]])
    def test_what_the_model_writes_comes_back(
        self, prompt: FASTPrompt, chunk: np.ndarray, after: list[int]
    ) -> None:
        written = prompt.encode(chunk)
        expected = prompt.fast.decode(prompt.fast.encode(chunk), HORIZON, DIM)
        assert written[-2:] == [127, 1]
        tokens = np.array([*written[:-2], *after], dtype=np.int32)
        np.testing.assert_array_equal(prompt.decode(tokens, HORIZON, DIM), expected)

    @settings(max_examples=100, deadline=None)
    @given(tail=st.lists(st.integers(0, 1000), max_size=60), opening=st.booleans())
    def test_nonsense_is_zeros_or_a_chunk(
        self, fitted: FASTTokenizer, tail: list[int], opening: bool
    ) -> None:
        prompt = FASTPrompt(BytesTokenizer(), fitted, vocab_size=1000, max_len=200)
        tokens = BytesTokenizer().encode("Action: ") * opening + tail
        decoded = prompt.decode(tokens, 2, 2)
        assert decoded.shape == (2, 2)
        assert np.isfinite(decoded).all()

    def test_missing_opening_warns_once(
        self, prompt: FASTPrompt, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert not prompt.decode([5, 6, 7], HORIZON, DIM).any()
        assert len(caplog.records) == 1
        assert "3 tokens" in caplog.text

    def test_codes_never_take_the_ids_of_text(self, prompt: FASTPrompt, chunk: np.ndarray) -> None:
        small = FASTPrompt(
            prompt.text, prompt.fast, vocab_size=prompt.vocab_size - 1, max_len=prompt.max_len
        )
        with pytest.raises(ValueError, match=f"at least {prompt.vocab_size}"):
            small.encode(chunk)

    def test_pickles(self, prompt: FASTPrompt, chunk: np.ndarray) -> None:
        before = prompt.encode(chunk)
        assert pickle.loads(pickle.dumps(prompt)).encode(chunk) == before
