"""One remote file becomes one local file, however often the way there breaks.

Knows requests, attempts and versions; knows nothing of the cache or of locks.

    model.safetensors                   finished: only an atomic rename puts it there
    model.safetensors.partial           what has arrived so far ...
    model.safetensors.partial.version   ... and of which version of the remote file
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich import filesize

logger = logging.getLogger(__name__)

ATTEMPTS = 4  # in a row without a single new byte
BACKOFF = 0.5  # seconds before the second attempt; doubles from there
TIMEOUT = 30.0  # seconds of silence
SMALLEST_READ, LARGEST_READ = 2**20, 2**26

T = TypeVar("T")
Progress = Callable[[int, int | None], None]  # bytes done, of how many


class Interrupted(Exception):
    """Something broke on the way that may well work the next time."""


@dataclasses.dataclass(frozen=True)
class Stream:
    start: int  # the byte it begins with: not the one asked for where the server cannot do that
    size: int | None  # of the whole file; some servers do not say
    version: str
    chunks: Iterator[bytes]


class Remote(Protocol):
    def open(self, start: int) -> contextlib.AbstractContextManager[Stream]: ...


def fetch(remote: Remote, target: Path, show: Progress, force: bool = False) -> None:
    """Download one file to `.partial`, going on from what is there, then put it in place."""
    if target.is_dir():
        raise IsADirectoryError(
            f"{target} is a folder, because files below it were downloaded, but the location is "
            "a file. Remove the folder first."
        )
    partial, version = partial_of(target), Path(f"{partial_of(target)}.version")
    target.parent.mkdir(parents=True, exist_ok=True)
    if force:
        partial.unlink(missing_ok=True)
    patiently(
        lambda: _attempt(remote, partial, version, show), target.name, lambda: size_of(partial)
    )
    partial.replace(target)
    version.unlink()


def partial_of(target: Path) -> Path:
    return Path(f"{target}.partial")


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def patiently(attempt: Callable[[], T], what: str, reached: Callable[[], int] = lambda: 0) -> T:
    """Repeat what was interrupted, until several attempts in a row got no further."""
    furthest, failures = reached(), 0
    while True:
        try:
            return attempt()
        except Interrupted as interruption:
            failures += 1
            if reached() > furthest:
                furthest, failures = reached(), 1
            if failures >= ATTEMPTS:
                raise
            wait = BACKOFF * 2 ** (failures - 1)
            logger.warning("%s: %s. Trying again in %.1f s", what, interruption, wait)
            time.sleep(wait)


def _attempt(remote: Remote, partial: Path, version: Path, show: Progress) -> None:
    done = size_of(partial) if version.exists() else 0
    with remote.open(done) as stream:
        if done and stream.start == done and stream.version == version.read_text():
            _receive(stream, partial, show)
            return
        # In this order: a new version's name never stands beside old bytes.
        partial.unlink(missing_ok=True)
        version.write_text(stream.version)
        if stream.start == 0:
            _receive(stream, partial, show)
            return
    logger.info("%s: the remote file has changed; starting afresh", partial)
    with remote.open(0) as stream:
        version.write_text(stream.version)
        _receive(stream, partial, show)


def _receive(stream: Stream, partial: Path, show: Progress) -> None:
    done = stream.start
    require_space(partial.parent, (stream.size or done) - done)
    show(done, stream.size)
    with partial.open("ab") as file:
        for chunk in stream.chunks:
            file.write(chunk)
            done += len(chunk)
            show(done, stream.size)
        file.flush()
        os.fsync(file.fileno())
    if stream.size is not None and done != stream.size:
        if done > stream.size:
            partial.unlink()
        raise Interrupted(f"got {done} bytes of {stream.size}")


def require_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(
            errno.ENOSPC,
            f"{filesize.decimal(size)} to download, but only {filesize.decimal(free)} free. "
            "Make room, or set PISTON_HOME to a folder on a larger disk",
            str(folder),
        )


@contextlib.contextmanager
def asking(location: str) -> Iterator[None]:
    """Sorts what a remote may raise: not there, not allowed, or interrupted.

    Every file system raises errors of its own libraries; what cannot be told apart is tried again.
    """
    try:
        yield
    except Exception as error:
        response = getattr(error, "response", None)
        status = getattr(error, "code", getattr(response, "status_code", None))
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise FileNotFoundError(
                f"{location} is not there: {error}. Check the spelling and, if it is private, "
                "that you are logged in."
            ) from error
        if isinstance(error, PermissionError) or status in (401, 403):
            raise PermissionError(
                f"No access to {location}: {error}. Log in (for hf:// with: hf auth login; for "
                "gs:// with: gcloud auth application-default login)."
            ) from error
        raise Interrupted(f"{type(error).__name__}: {error}") from error


@dataclasses.dataclass(frozen=True)
class HttpFile:
    """Not fsspec's HTTP files: those do not see a file change between two requests."""

    location: str

    @contextlib.contextmanager
    def open(self, start: int) -> Iterator[Stream]:
        with asking(self.location):
            response = self._response(start)
        with contextlib.closing(response):
            headers = response.headers
            begin, size = 0, headers["Content-Length"] and int(headers["Content-Length"])
            if response.status == 206:
                found = re.match(r"bytes (\d+)-\d+/(\d+)", headers["Content-Range"] or "")
                begin, size = (int(found[1]), int(found[2])) if found else (-1, None)
            version = f"{headers['ETag'] or headers['Last-Modified']} {size}"
            yield Stream(begin, size, version, self._chunks(response))

    def _response(self, start: int) -> Any:
        url = urllib.parse.quote(self.location.partition("#")[0], safe=":/?[]@!$&'()*+,;=%~")
        headers = {"User-Agent": "piston", **({"Range": f"bytes={start}-"} if start else {})}
        request = urllib.request.Request(url, headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not start:
                raise
            return self._response(0)  # the file has become shorter

    def _chunks(self, response: Any) -> Iterator[bytes]:
        while True:
            with asking(self.location):
                chunk = response.read1(SMALLEST_READ)
            if not chunk:
                return
            yield chunk


class FsspecFile:
    def __init__(self, files: Any, path: str, location: str) -> None:
        self._files, self._path, self._location = files, path, location
        self._opened = False

    @contextlib.contextmanager
    def open(self, start: int) -> Iterator[Stream]:
        with asking(self._location):
            if self._opened:  # a further attempt: is it still the same file?
                self._files.invalidate_cache()
            self._opened = True
            info = self._files.info(self._path)
            file = self._files.open(self._path, "rb", cache_type="none")
        with contextlib.closing(file):
            yield Stream(start, info["size"], version_of(info), self._chunks(file, start))

    def _chunks(self, file: Any, start: int) -> Iterator[bytes]:
        """Each read is a request of its own: larger ones while they take less than a second."""
        file.seek(start)
        length = SMALLEST_READ
        while True:
            begun = time.monotonic()
            with asking(self._location):
                chunk = file.read(length)
            if not chunk:
                return
            quick = time.monotonic() - begun < 1
            length = min(2 * length, LARGEST_READ) if quick else max(length // 2, SMALLEST_READ)
            yield chunk


def version_of(info: dict[str, Any]) -> str:
    """What changes when the file does, from fsspec's description of it."""
    keys = ("etag", "ETag", "blob_id", "xet_hash", "generation", "mtime", "created")
    return f"{next((info[key] for key in keys if info.get(key)), None)} {info['size']}"
