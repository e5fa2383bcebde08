"""A location (path, file://, http(s)://, gs://, hf://) becomes a local file or folder.

    <home>/assets/<scheme>/<host or bucket>/<path>    users may also put files here by hand
        model.safetensors                   complete: only a rename gives a file this name
        .piston-partial.model.safetensors   the bytes that have arrived
        .piston-version.model.safetensors   the version of the remote file that they belong to
        .piston-complete                    all files of this folder are there (JSON: versions)
        .piston-incomplete                  the same, while the folder is being downloaded
    <home>/locks/…                          one per file or folder that was ever downloaded

A download that was interrupted continues where it stopped, if the server names versions of its
files. Several processes may ask for the same location: one of them downloads it. What is there is
used without asking for a newer version.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import fsspec
from rich import filesize

from piston.extras import missing_package
from piston.progress import BYTES, Progress, ProgressBar

logger = logging.getLogger(__name__)

_OWN = ".piston-"  # only this module writes files whose names start with this
COMPLETE, INCOMPLETE = f"{_OWN}complete", f"{_OWN}incomplete"
ATTEMPTS = 4  # in a row without a new byte
BACKOFF = 0.5  # seconds before the second attempt; doubles with each further one
TIMEOUT = 30.0  # seconds without data
SMALLEST_READ, LARGEST_READ = 2**20, 2**26
FILES_AT_ONCE = 8
_SECONDS_TO_STOP = 3.0
_HTTP = ("http", "https")


class DownloadError(ConnectionError):
    """The network failed; the message says how to continue without it."""


class InsecureRedirect(ValueError):
    """An https:// location led to an address that is not encrypted."""


def home() -> Path:
    """Return the folder for downloads: PISTON_HOME, or ~/.cache/piston."""
    return Path(os.environ.get("PISTON_HOME") or "~/.cache/piston").expanduser().absolute()


def resolve(location: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Return the local file or folder of a location; download it unless it is there.

    `force` downloads it again. Local paths are returned unchanged.
    """
    text = os.fspath(location)
    path = local_path(text)
    if path is not None:
        if not path.exists():
            raise FileNotFoundError(f"{path.absolute()} does not exist (asked for: {text}).")
        return path
    scheme = text.partition("://")[0].lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in ("file", *SCHEMES))
        raise ValueError(f"Unknown scheme {scheme}:// in {text}. Known: a local path, {known}.")
    text = scheme + text[len(scheme) :]
    target = home().joinpath("assets", scheme, *_parts(text))
    if not force and _is_present(target):
        return target
    with _lock(target):
        if force or not _is_present(target):  # another process may have downloaded it
            try:
                _download(text, target, force)
            except DownloadError as error:
                raise DownloadError(
                    f"Could not download {text}: {error}.\nRun again to continue from where it "
                    f"stopped. Without network, {_instructions(text, target)}"
                ) from error
    return target


def local_path(location: str) -> Path | None:
    """Return the path of a location on this machine, a path or file://; None for any other one."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", location)
    if match is None:
        return Path(location).expanduser()
    if match[1].lower() != "file":
        return None
    url = urllib.parse.urlsplit(location)
    if url.netloc not in ("", "localhost"):
        raise ValueError(f"{location} names the host {url.netloc!r}; write file:///path.")
    return Path(urllib.request.url2pathname(url.path))


def _parts(location: str) -> list[str]:
    """Return the path of a location in the cache: host or bucket, folders, name."""
    scheme, _, path = location.partition("://")
    query = ""
    if scheme in _HTTP:
        url = urllib.parse.urlsplit(location)
        path, query = url.netloc + url.path, url.query
        if "@" in url.netloc or path.endswith("/"):
            raise ValueError(f"{location}: expected {scheme}://host/path/to/file, and no password.")
    parts = _safe_parts(path, location)
    if len(parts) < (3 if scheme == "hf" and parts[:1] == ["datasets"] else 2):
        hf = "hf://owner/name[/path] or hf://datasets/owner/name[/path]"
        expected = hf if scheme == "hf" else f"{scheme}://host-or-bucket/path"
        raise ValueError(f"{location} is too short; expected {expected}.")
    if any(part.startswith(_OWN) for part in parts):
        raise ValueError(f"{location}: names that start with {_OWN} are Piston's own.")
    if len(query) > 100:  # a signed URL: too long for a file name
        query = hashlib.sha256(query.encode()).hexdigest()[:16]
    if query:
        parts[-1] += "?" + urllib.parse.quote(query, safe="=&")
    return parts


def _safe_parts(path: str, location: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") or "\\" in part or "\0" in part for part in parts):
        raise ValueError(f"{location}: refused the path {path!r}, which may lead out of the cache.")
    return parts


def _instructions(location: str, target: Path) -> str:
    scheme = location.partition("://")[0]
    mark = f"    touch {shlex.quote(str(target))}/{COMPLETE}\n"
    return (
        f"download it elsewhere, for example with\n    {SCHEMES[scheme](location)}\n"
        f"and put it at\n    {target}\n"
        + ("" if scheme in _HTTP else f"if it is a folder, with the mark of completeness:\n{mark}")
        + "It is then used as it is."
    )


def _hf_download(location: str) -> str:
    parts = _parts(location)
    kind = " --repo-type dataset" if parts[0] == "datasets" else ""
    owner, repository, *path = parts[1:] if kind else parts
    name, _, revision = repository.partition("@")
    command = f"hf download {owner}/{name}{kind}" + (f" --revision {revision}" if revision else "")
    return command + (f" --include '{'/'.join(path)}*'" if path else "") + f" --local-dir {name}"


# For each scheme, the command with which a user downloads a location. Schemes other than HTTP are
# names of fsspec's file systems.
SCHEMES: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(_HTTP, lambda location: f"curl -fLO {shlex.quote(location)}"),
    "gs": lambda location: f"gcloud storage cp -r {shlex.quote(location)} .",
    "hf": _hf_download,
}


def _is_present(target: Path) -> bool:
    """Whether a file exists, or a folder is marked complete, itself or by a folder around it."""
    if not target.is_dir():
        return target.is_file()
    for folder in (target, *target.parents):
        complete = (folder / COMPLETE).exists()
        if complete or (folder / INCOMPLETE).exists():
            return complete
    return False


@contextlib.contextmanager
def _lock(target: Path, stopped: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock of a target among all processes; the system releases it if this one dies."""
    path = home() / "locks" / target.relative_to(home() / "assets")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, timeout = filelock.FileLock(f"{path}.lock"), 0.0
    while not lock.is_locked:
        try:
            lock.acquire(timeout=timeout)
        except filelock.Timeout:
            if not timeout:
                logger.info("Waiting for another process that is downloading %s", target)
            if stopped is not None and stopped.is_set():
                raise CancelledError from None
            timeout = 0.5
    try:
        yield
    finally:
        lock.release()


def _download(location: str, target: Path, force: bool) -> None:
    logger.info("Downloading %s to %s", location, target)
    scheme, _, path = location.partition("://")
    if scheme in _HTTP:
        source: Source = lambda start, _: _open_http(location, start)  # noqa: E731
    else:
        try:
            files = fsspec.filesystem(scheme, skip_instance_cache=True)
        except ImportError as error:
            if scheme != "gs":
                raise
            instructions = (
                f"{missing_package(location, 'gcsfs')}\nOr {_instructions(location, target)}"
            )
            raise ImportError(instructions) from error
        info = _ask(location, lambda: files.info(path.rstrip("/")))
        if info["type"] == "directory":
            _download_folder(files, info["name"].rstrip("/"), target, location, force)
            return
        source = functools.partial(_open_file, files, info["name"])
    partial = _own(target, "partial")
    if force:
        partial.unlink(missing_ok=True)
    with ProgressBar(target.name, BYTES, done=_size_of(partial), after=1) as bar:
        _fetch(source, location, target, bar.show)


def _download_folder(files: Any, root: str, target: Path, location: str, force: bool) -> None:
    infos = {}
    for path, info in _ask(location, lambda: files.find(root, detail=True)).items():
        # Object stores mark "folders" with empty objects whose names end in a slash.
        if info["type"] != "file" or path.endswith("/"):
            continue
        if not path.startswith(root + "/"):
            raise ValueError(f"{location}: its listing has {path!r}, which is not in {root!r}.")
        parts = _safe_parts(path[len(root) + 1 :], location)
        if not any(part.startswith(_OWN) for part in parts):
            infos["/".join(parts)] = info
    if not infos:
        raise FileNotFoundError(f"{location} is a folder without any file.")
    target.mkdir(parents=True, exist_ok=True)
    # Folders around this one are not complete either until all of its files are there again.
    folders = [target, *(folder for folder in target.parents if (folder / COMPLETE).exists())]
    for folder in folders:
        if (folder / COMPLETE).exists():
            (folder / COMPLETE).replace(folder / INCOMPLETE)
    # Files of other versions that an earlier attempt left are removed.
    note = target / INCOMPLETE
    earlier = json.loads((note.read_text() if note.exists() else "") or "{}")
    versions = {name: _version_of(info) for name, info in infos.items()}
    for name in earlier.keys() | versions.keys():
        file, now = target / name, versions.get(name)
        if force:
            _own(file, "partial").unlink(missing_ok=True)
        size = infos[name]["size"] if name in infos else None
        if file.exists() and (
            force or earlier.get(name, now) != now or file.stat().st_size != size
        ):
            logger.warning("Removing %s, to download it again", file)
            file.unlink()
    note.write_text(json.dumps(versions, indent=1))
    _fetch_all(files, infos, target, location)
    for folder in folders:
        (folder / INCOMPLETE).replace(folder / COMPLETE)


def _fetch_all(files: Any, infos: dict[str, Any], target: Path, location: str) -> None:
    """Download several files at a time: a checkpoint has hundreds, most of them small."""
    waiting = iter(sorted(infos))  # which all threads share
    sizes = {
        name: _size_of(target / name) or _size_of(_own(target / name, "partial")) for name in infos
    }
    total, there = sum(info["size"] for info in infos.values()), sum(sizes.values())
    _require_space(target, total - there)
    bar = ProgressBar(target.name, BYTES, total, done=there, after=1)
    stopped, failures = threading.Event(), list[Exception]()

    def work() -> None:
        name = ""

        def show(done: int, total: int | None = None, note: str = "") -> None:  # noqa: ARG001
            if stopped.is_set():
                raise CancelledError
            sizes[name] = done
            bar.show(sum(sizes.values()))

        try:
            for name in waiting:
                source = functools.partial(_open_file, files, infos[name]["name"])
                with _lock(target / name, stopped):
                    if not (target / name).is_file():
                        _fetch(source, f"{location}/{name}", target / name, show)
        except CancelledError:
            return
        except DownloadError as error:
            failures.append(DownloadError(f"{name}: {error}"))
        except Exception as error:
            failures.append(error)
        if failures:
            stopped.set()

    # Not an executor: at exit Python would wait for its threads, also for one that hangs.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(FILES_AT_ONCE)]
    try:
        with bar:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not stopped.wait(0.05):
                pass
    finally:
        stopped.set()  # also after Ctrl-C: the other threads end at their next bytes
    if failures:
        end = time.monotonic() + _SECONDS_TO_STOP
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))
        raise failures[0]


class _Stream(NamedTuple):
    start: int  # its first byte: 0 if the server cannot start elsewhere
    size: int | None  # of the whole file; some servers do not say
    version: str | None  # a text that changes with the file; some servers do not say
    read: Callable[[int], bytes]
    close: Callable[[], None]


Source = Callable[[int, bool], _Stream]  # first byte; whether an earlier attempt failed


def _fetch(source: Source, location: str, target: Path, progress: Progress) -> None:
    """Download a file under another name, continuing with the bytes there, then rename it."""
    if target.is_dir():
        raise IsADirectoryError(
            f"{target} is a folder, because files below it were downloaded, but the location is "
            "a file. Remove the folder first."
        )
    partial, version = _own(target, "partial"), _own(target, "version")
    target.parent.mkdir(parents=True, exist_ok=True)
    remote = _sorted_errors(location)
    open_at = remote(source)

    def attempt(again: bool) -> None:
        done = _size_of(partial) if version.exists() else 0
        stream = open_at(done, again)
        if done and (stream.start != done or stream.version != version.read_text()):
            logger.info("%s: the remote file has changed; starting again", target)
            if stream.start:
                stream.close()
                stream = open_at(0, again)
            done = 0
        with contextlib.closing(stream):
            if not done:
                # In this order: the name of a new version is never beside bytes of an old one.
                partial.unlink(missing_ok=True)
                version.unlink(missing_ok=True)
                if stream.version is not None:
                    version.write_text(stream.version)
            _receive(stream, remote(stream.read), partial, progress)

    _retry(attempt, target.name, lambda: _size_of(partial))
    partial.replace(target)
    version.unlink(missing_ok=True)


def _retry(attempt: Callable[[bool], Any], what: str, reached: Callable[[], int]) -> Any:
    """Repeat an attempt until it succeeds, or several in a row made no progress."""
    furthest, failures = reached(), 0
    while True:
        try:
            return attempt(failures > 0)
        except DownloadError as error:
            failures += 1
            if reached() > furthest:
                furthest, failures = reached(), 1
            if failures >= ATTEMPTS:
                raise
            wait = BACKOFF * 2 ** (failures - 1)
            logger.warning("%s: %s. Trying again in %.1f s", what, error, wait)
            time.sleep(wait)


def _ask(location: str, question: Callable[[], Any]) -> Any:
    ask = _sorted_errors(location)(question)
    return _retry(lambda _: ask(), location, lambda: 0)


def _receive(
    stream: _Stream, read: Callable[[int], bytes], partial: Path, progress: Progress
) -> None:
    """Append the stream to the file; reads grow while they take less than a second."""
    done, size, length = stream.start, stream.size, SMALLEST_READ
    _require_space(partial.parent, (size or done) - done)
    progress(done, size)
    with partial.open("ab") as file:
        begun = time.monotonic()
        while chunk := read(length):
            quick = time.monotonic() - begun < 1
            length = min(2 * length, LARGEST_READ) if quick else max(length // 2, SMALLEST_READ)
            file.write(chunk)
            done += len(chunk)
            progress(done, size)
            begun = time.monotonic()
        file.flush()
        os.fsync(file.fileno())
    if size is not None and done != size:
        if done > size:
            partial.unlink()
        raise DownloadError(f"got {done} bytes of {size}")


class _EncryptedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from https:// to another scheme."""

    def redirect_request(self, req: Any, *args: Any) -> urllib.request.Request | None:
        request = super().redirect_request(req, *args)
        if request is not None and req.type == "https" != request.type:
            raise InsecureRedirect(f"{req.full_url} leads to {request.full_url}: not encrypted.")
        return request


def _open_http(location: str, start: int, ranges: bool = True) -> _Stream:
    """Open a URL. fsspec's HTTP files do not notice that a file changed between two requests.

    The first request too asks for a range: its answer states the size also where there is no
    Content-Length, so that a lost connection is not taken for the end of the file.
    """
    url = urllib.parse.quote(location.partition("#")[0], safe=":/?[]@!$&'()*+,;=%~")
    headers = {"User-Agent": "piston", **({"Range": f"bytes={start}-"} if ranges else {})}
    opener = urllib.request.build_opener(_EncryptedRedirects)
    try:
        response = opener.open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not ranges:
            raise
        return _open_http(location, 0, ranges=False)  # the file is empty or has become shorter
    headers, size = response.headers, None
    coding = headers["Content-Encoding"] or "identity"
    if response.status not in (200, 203, 206) or coding != "identity":
        response.close()
        raise ValueError(
            f"the server answers with status {response.status} and the encoding {coding}; expected "
            "the file itself (200, identity)"
        )
    if response.status == 206:
        found = re.match(rf"bytes {start}-\d+/(\d+)", headers["Content-Range"] or "")
        if found is None:  # not the range that was asked for
            response.close()
            return _open_http(location, 0, ranges=False)
        size = int(found[1])
    else:
        start, length = 0, headers["Content-Length"]
        if length is not None and not length.isdecimal():
            response.close()
            raise ValueError(f"the Content-Length is {length!r}; expected a number of bytes")
        if length is not None:
            size = int(length)
        elif not response.chunked:  # chunks have an end mark
            logger.warning("%s may be cut off: the server does not state the size", location)
    tag = headers["ETag"] or headers["Last-Modified"]
    return _Stream(start, size, tag and f"{tag} {size}", response.read1, response.close)


def _open_file(files: Any, path: str, start: int, again: bool) -> _Stream:
    if again:  # the file may have changed
        files.invalidate_cache()
    info = files.info(path)
    file = files.open(path, "rb", cache_type="none")
    file.seek(start)
    return _Stream(start, info["size"], _version_of(info), file.read, file.close)


@contextlib.contextmanager
def _sorted_errors(location: str) -> Iterator[None]:
    """Raise FileNotFoundError, PermissionError or DownloadError for the errors of any library.

    Every file system raises errors of its own; what is neither of the first two is tried again.
    """
    try:
        yield
    except InsecureRedirect:
        raise
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
        raise DownloadError(f"{type(error).__name__}: {error}") from error


def _require_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(
            errno.ENOSPC,
            f"{filesize.decimal(size)} to download, but only {filesize.decimal(free)} free. "
            "Make room, or set PISTON_HOME to a folder on a larger disk",
            str(folder),
        )


def _version_of(info: dict[str, Any]) -> str | None:
    """Return a text that changes with the file, from fsspec's description of it."""
    keys = ("etag", "ETag", "blob_id", "xet_hash", "generation", "mtime", "created")
    tag = next((info[key] for key in keys if info.get(key)), None)
    return tag and f"{tag} {info['size']}"


def _own(target: Path, kind: str) -> Path:
    return target.with_name(f"{_OWN}{kind}.{target.name}")


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
