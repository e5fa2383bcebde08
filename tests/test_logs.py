"""The log line: its form, one handler, and nothing of the record changed for others."""

import contextlib
import logging
import os
import re

import pytest

from piston.logs import LineFormatter, init_logging


@contextlib.contextmanager
def bare_root():
    """The root logger without handlers, as in a fresh process; put back afterwards.

    Not a fixture: pytest adds handlers of its own between set-up and call.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield root
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _record(level=logging.INFO, message="Saved checkpoint", *args):
    return logging.LogRecord("piston", level, "/somewhere/loop.py", 212, message, args, None)


def test_line_looks_as_documented():
    line = LineFormatter().format(_record())
    message = "Saved checkpoint".ljust(80)
    pattern = rf"\d\d:\d\d:\d\d\.\d{{3}} \[I\] {message} \({os.getpid()}:loop\.py:212\)"
    assert re.fullmatch(pattern, line)


@pytest.mark.parametrize(("milliseconds", "shown"), [(0.0, "000"), (7.9, "007"), (999.99, "999")])
def test_milliseconds_have_three_digits(milliseconds, shown):
    record = _record()
    record.msecs = milliseconds
    assert re.match(rf"\d\d:\d\d:\d\d\.{shown} ", LineFormatter().format(record))


@pytest.mark.parametrize(
    ("level", "letter"),
    [
        (logging.DEBUG, "D"),
        (logging.INFO, "I"),
        (logging.WARNING, "W"),
        (logging.ERROR, "E"),
        (logging.CRITICAL, "C"),
    ],
)
def test_one_letter_per_level_and_the_record_keeps_its_name(level, letter):
    record = _record(level)
    assert f"[{letter}]" in LineFormatter().format(record)
    assert record.levelname == logging.getLevelName(level)
    assert logging.Formatter("%(levelname)s").format(record) == logging.getLevelName(level)


def test_a_fresh_root_logger_gets_one_handler_at_info():
    with bare_root() as root:
        init_logging()
        init_logging()
        assert root.level == logging.INFO
        assert len(root.handlers) == 1
        assert isinstance(root.handlers[0].formatter, LineFormatter)


def test_an_existing_handler_gets_the_formatter_instead_of_a_second_handler():
    with bare_root() as root:
        handler = logging.StreamHandler()
        root.addHandler(handler)
        init_logging()
        assert root.handlers == [handler]
        assert isinstance(handler.formatter, LineFormatter)


def test_debug_records_are_never_formatted(monkeypatch):
    formatted = []
    plain = LineFormatter.format

    def noting(self, record):
        formatted.append(record.getMessage())
        return plain(self, record)

    monkeypatch.setattr(LineFormatter, "format", noting)
    verbose = logging.getLogger("piston.verbose")
    monkeypatch.setattr(verbose, "level", logging.DEBUG)
    with bare_root():
        init_logging()
        logging.debug("from the root")
        verbose.debug("from a logger with a level of its own")
        verbose.info("this one")
    assert formatted == ["this one"]
