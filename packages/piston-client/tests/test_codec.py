"""The wire format: the same bytes as openpi-client, and nothing bad gets through."""

import contextlib
import struct
import time
import tracemalloc

import hypothesis.extra.numpy as arrays
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piston_client.codec import ProtocolError, pack, unpack

try:
    from openpi_client import msgpack_numpy
except ImportError:
    msgpack_numpy = None
compares_with_openpi = pytest.mark.skipif(
    msgpack_numpy is None,
    reason="needs openpi-client, which is installed where Piston is; the message that it wrote, in "
    "tests/reference, is compared regardless",
)

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays.unicode_string_dtypes(endianness="?", min_len=1, max_len=5),
    arrays.byte_string_dtypes(min_len=1, max_len=5),
)
ARRAYS = DTYPES.flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    )
)
SCALARS = st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    st.floats().map(np.float64),
    st.booleans().map(np.bool_),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(),
    st.binary(),
)
MESSAGES = st.recursive(
    st.one_of(PLAIN, ARRAYS, SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


def assert_same(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for pair in zip(found, expected):
            assert_same(*pair)
    elif isinstance(expected, np.ndarray):
        assert found.shape == expected.shape
        # Byte order is the machine's own after reading.
        assert found.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, expected)
    else:
        assert type(found) is type(expected)
        assert found == expected or (found != found and expected != expected)


@compares_with_openpi
@given(MESSAGES)
@settings(deadline=None)
def test_same_bytes_as_openpi_and_back(message):
    assert pack(message) == msgpack_numpy.packb(message)
    assert_same(unpack(msgpack_numpy.packb(message)), msgpack_numpy.unpackb(pack(message)))


@given(MESSAGES)
@settings(deadline=None)
def test_there_and_back(message):
    assert_same(unpack(pack(message), writable=True), message_without_subclasses(message))


def message_without_subclasses(message):
    """np.float64 is a float to msgpack, so it comes back as one."""
    if isinstance(message, dict):
        return {key: message_without_subclasses(value) for key, value in message.items()}
    if isinstance(message, list):
        return [message_without_subclasses(value) for value in message]
    return float(message) if isinstance(message, np.float64) else message


def test_the_public_library_s_message(small_reference):
    message = unpack((small_reference / "message.msgpack").read_bytes())
    np.testing.assert_array_equal(message["state"], np.arange(14, dtype=np.float32))
    assert message["images"]["cam_high"].shape == (2, 4, 3)
    assert message["images"]["cam_high"].dtype == np.uint8
    assert message["strs"].tolist() == ["a", "bc"]
    assert (message["prompt"], message["n"], message["flag"]) == ("do it", 3, True)
    assert pack(message) == (small_reference / "message.msgpack").read_bytes()


def test_arrays_that_do_not_lie_in_order():
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    for array in (image.transpose(2, 0, 1), image[:, ::-1], np.asfortranarray(image)):
        np.testing.assert_array_equal(unpack(pack(array)), array)
        in_order = np.ascontiguousarray(array)
        assert pack(array) == pack(in_order)
        if msgpack_numpy is not None:
            assert pack(array) == msgpack_numpy.packb(array)


def test_images_are_views_and_actions_can_be_changed_on_request():
    message = pack({"image": np.zeros((8, 8, 3), np.uint8), "x": np.zeros(3, np.float32)})
    read = unpack(message)
    for array in read.values():
        # The bytes that msgpack has read, not a copy of them; PyTorch expects them to be aligned.
        assert isinstance(array.base, bytes)
        assert array.flags.aligned
    for array in read.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
    for array in unpack(message, writable=True).values():
        array[...] = 1


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": {"b": np.array([None])}}, r"\['a'\]\['b'\].*object"),
        ({"z": np.zeros(2, np.complex64)}, "complex64"),
        ({"z": [0, np.zeros(2, "V4")]}, r"\['z'\]\[1\]"),
        ({"when": np.datetime64("2024-01-01")}, "datetime64"),
        ({"set": {1, 2}}, "set cannot be sent"),
        (2**80, "64 bits"),
    ],
)
def test_what_cannot_be_sent_is_named(value, says):
    with pytest.raises(ProtocolError, match=says):
        pack(value)


def test_a_message_that_contains_itself():
    loop: dict = {}
    loop["again"] = loop
    with pytest.raises(ProtocolError, match="nested"):
        pack(loop)


def array_message(*, data=b"\0" * 4, dtype="<f4", shape=(1,), **more):
    fields = {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape, **more}
    return msgpack.packb(fields)


def scalar_message(data, dtype):
    return msgpack.packb({b"__npgeneric__": True, b"data": data, b"dtype": dtype})


BAD = {
    "object array": array_message(dtype="|O", data=b"\0" * 8),
    "record array": array_message(dtype="|V4"),
    "a dtype with fields": array_message(dtype="f4,i4", data=b"\0" * 8),
    "a dtype with a shape": array_message(dtype="(9999999,)f4"),
    "a dtype that is no text": array_message(dtype=[["a", "<f4"]]),
    "no dtype": array_message(dtype=None),
    "a float of 128 bits": array_message(dtype="<f16", data=b"\0" * 16),
    "text of no length": array_message(dtype="<U0", data=b"", shape=(2**40,)),
    "dates": array_message(dtype="<M8[s]", data=b"\0" * 8),
    "huge shape, little data": array_message(shape=(2**40, 2**20)),
    "huge shape that overflows to 4 bytes": array_message(shape=(2**63 - 1, 2**63 - 1, 4)),
    "huge empty shape": array_message(shape=(0, 2**40), data=b""),
    "negative size": array_message(shape=(-1, -1)),
    "size true": array_message(shape=(True,)),
    "fractional size": array_message(shape=(1.0,)),
    "a shape that is no list": array_message(shape=1),
    "too many axes": array_message(shape=(1,) * 33),
    "too much data": array_message(data=b"\0" * 8),
    "data that is text": array_message(data="\0" * 4),
    "data that is a list": array_message(data=[0, 0, 0, 0]),
    "another key": array_message(**{"more": 1}),
    "missing keys": msgpack.packb({b"__ndarray__": True, b"data": b""}),
    "bool that is 7": array_message(dtype="|b1", data=b"\7"),
    "a character beyond Unicode": array_message(dtype="<U1", data=b"\xff\xff\xff\xff"),
    "scalar too large": scalar_message(300, "|i1"),
    "negative unsigned": scalar_message(-1, "|u1"),
    "float too large": scalar_message(1e300, "<f4"),
    "text as a number": scalar_message("7", "<f4"),
    "list as a number": scalar_message([1.0], "<f4"),
    "bool as an integer": scalar_message(True, "<i4"),
    "object scalar": scalar_message(1, "|O"),
    "text scalar": scalar_message("a", "<U1"),
    "extension": msgpack.packb(msgpack.ExtType(42, b"x")),
    "timestamp": msgpack.packb(msgpack.Timestamp(1, 2)),
    "the byte that means nothing": b"\xc1",
    "empty": b"",
    "two messages": b"\x01\x01",
    "text that is not UTF-8": b"\xa2\xff\xff",
    "a number as key": msgpack.packb({1: 2}),
    "a list as key": b"\x81\x90\x01",
    "the same key twice": b"\x82\xa1a\x01\xa1a\x02",
    "list of 2**32 - 1": b"\xdd\xff\xff\xff\xff",
    "map of 2**32 - 1": b"\xdf\xff\xff\xff\xff",
    "binary of 2**32 - 1": b"\xc6\xff\xff\xff\xff",
    "text of 2**32 - 1": b"\xdb\xff\xff\xff\xff",
    "nested lists": b"\x91" * 5000 + b"\xc0",
    "nested maps": b"\x81\xa1a" * 5000 + b"\xc0",
    "nested arrays": b"\x84" + b"\xc4\x0b__ndarray__" + b"\x91" * 5000,
    # Each list claims as many values as bytes are left; nothing may be allocated for them.
    "lists that each claim a megabyte": (b"\xdd" + struct.pack(">I", 2**20)) * 2**18,
    "many small values": msgpack.packb([0] * 30_000),
}


@pytest.mark.parametrize("message", BAD.values(), ids=BAD.keys())
def test_bad_messages_are_refused_quickly_and_cheaply(message):
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(ProtocolError) as caught:
        unpack(message)
    seconds = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value)) < 500
    assert peak < 2 * 2**20
    assert seconds < 1


def test_every_cut_of_a_message_is_refused():
    message = pack({"state": np.zeros(3, np.float32), "n": [1, 2.5, "text"], "b": b"x" * 300})
    for length in range(len(message)):
        with pytest.raises(ProtocolError):
            unpack(message[:length])


@compares_with_openpi
@given(st.binary(max_size=200))
@settings(deadline=None)
def test_random_bytes_give_what_msgpack_gives_or_an_error(data):
    with contextlib.suppress(ProtocolError):
        assert_same(unpack(data), msgpack_numpy.unpackb(data))


@given(MESSAGES, st.data())
@settings(deadline=None)
def test_damaged_messages_give_an_error_or_a_value(message, data):
    damaged = bytearray(pack(message))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        unpack(bytes(damaged))


def test_an_error_quotes_little_of_a_huge_message():
    huge = msgpack.packb({b"__ndarray__": True, b"x" * 10_000_000: 1})
    with pytest.raises(ProtocolError) as caught:
        unpack(huge)
    assert len(str(caught.value)) < 500


def test_nesting_and_the_number_of_values_are_limited():
    nested = b"\x91" * 32 + b"\xc0"
    assert pack(unpack(nested)) == nested
    with pytest.raises(ProtocolError, match="deeper than 32"):
        unpack(b"\x91" + nested)
    assert unpack(pack([1, 2, 3]), max_values=3) == [1, 2, 3]
    with pytest.raises(ProtocolError, match="more than 3 values"):
        unpack(pack([1, 2, 3, 4]), max_values=3)


def test_text_is_no_message():
    with pytest.raises(ProtocolError, match="found str"):
        unpack("text")
