"""Where things are kept: a location's place in the cache, and filling it once.

Knows locations, the layout of the cache and when something in it is finished; leaves the way over
the network to `transfer`. Does not look for newer versions of what is there unless told to.

    <home>/assets/<scheme>/<host or bucket>/<path>     a person may also put things here by hand
        .piston-complete      in a folder: every file of it is there (JSON: their versions)
        .piston-incomplete    the same, as long as the folder is being downloaded
    <home>/locks/...          one per file or folder that was ever downloaded
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import queue
import re
import shlex
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import fsspec

from piston.assets.transfer import (
    FsspecFile,
    HttpFile,
    Interrupted,
    Remote,
    asking,
    fetch,
    partial_of,
    patiently,
    require_space,
    size_of,
    version_of,
)
from piston.progress import BYTES, ProgressBar

logger = logging.getLogger(__name__)

COMPLETE = ".piston-complete"
INCOMPLETE = ".piston-incomplete"
FILES_AT_ONCE = 8
_SECONDS_TO_STOP = 3.0

Infos = dict[str, dict[str, Any]]  # fsspec's description of each file


class DownloadError(ConnectionError):
    """The network did not deliver; the message says how to do without it."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How one kind of location is reached: plain HTTP, or fsspec's file system of that name."""

    by_hand: Callable[[str], str]  # location → the command with which a person downloads it
    is_http: bool = False
    install: str | None = None  # what brings its file system, where that is an extra


def home() -> Path:
    """Where Piston keeps what it downloads: PISTON_HOME, or ~/.cache/piston."""
    return Path(os.environ.get("PISTON_HOME") or "~/.cache/piston").expanduser().absolute()


def resolve(location: str | os.PathLike[str], *, force: bool = False) -> Path:
    """The local file or folder for a location, downloaded unless it is there already.

    `force` downloads again what is there. Local paths are returned as they are, never copied.
    """
    text = os.fspath(location)
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if match is None or match[1].lower() == "file":
        path = Path(_path_of_file_url(text) if match else text).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"{path.absolute()} does not exist (asked for: {text}).")
        return path
    scheme = match[1].lower()
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in ("file", *SCHEMES))
        raise ValueError(f"Unknown scheme {scheme}:// in {text}. Known: a local path, {known}.")
    text = scheme + text[len(scheme) :]
    target = home().joinpath("assets", scheme, *_parts(text))
    if not force and _is_present(target):
        return target
    with _lock(target):
        if force or not _is_present(target):  # another process may have been quicker
            try:
                _download(text, target, force)
            except Interrupted as interruption:
                raise DownloadError(
                    f"Could not download {text}: {interruption}.\n"
                    "Run again to go on from where it stopped. Without network, "
                    + _by_hand(text, target)
                ) from interruption
    return target


def _path_of_file_url(location: str) -> str:
    url = urllib.parse.urlsplit(location)
    if url.netloc not in ("", "localhost"):
        raise ValueError(f"{location} names the host {url.netloc!r}; write file:///path.")
    return urllib.request.url2pathname(url.path)


def _parts(location: str) -> list[str]:
    """The folders and the name under which a location is kept: host or bucket first."""
    scheme, _, path = location.partition("://")
    query = ""
    if SCHEMES[scheme].is_http:
        url = urllib.parse.urlsplit(location)
        path, query = url.netloc + url.path, url.query
        if "@" in url.netloc or path.endswith("/"):
            raise ValueError(f"{location}: expected {scheme}://host/path/to/file, and no password.")
    parts = _safe_parts(path, location)
    if len(parts) < (3 if scheme == "hf" and parts[:1] == ["datasets"] else 2):
        hf = "hf://owner/name[/path] or hf://datasets/owner/name[/path]"
        expected = hf if scheme == "hf" else f"{scheme}://host-or-bucket/path"
        raise ValueError(f"{location} is too short; expected {expected}.")
    if len(query) > 100:  # signed URLs: more than a file name may hold
        query = hashlib.sha256(query.encode()).hexdigest()[:16]
    if query:
        parts[-1] += "?" + urllib.parse.quote(query, safe="=&")
    return parts


def _safe_parts(path: str, location: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") or "\\" in part or "\0" in part for part in parts):
        raise ValueError(f"{location}: refused the path {path!r}, which may lead out of the cache.")
    return parts


def _is_present(target: Path) -> bool:
    """A file counts as it is; a folder only when it, or one that it is in, is marked complete."""
    if not target.is_dir():
        return target.is_file()
    for folder in (target, *target.parents):
        if (folder / COMPLETE).exists():
            return True
        if (folder / INCOMPLETE).exists():
            return False
    return False


@contextlib.contextmanager
def _lock(target: Path, stopped: threading.Event | None = None) -> Iterator[None]:
    """One download of a target at a time, in whichever process; ends with its process."""
    path = home() / "locks" / target.relative_to(home() / "assets")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("Waiting for another process that is downloading %s", target)
        while not lock.is_locked:
            if stopped is not None and stopped.is_set():
                raise _Stopped from None
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=0.5)
    try:
        yield
    finally:
        lock.release()


def _download(location: str, target: Path, force: bool) -> None:
    logger.info("Downloading %s to %s", location, target)
    scheme, _, path = location.partition("://")
    if SCHEMES[scheme].is_http:
        _fetch_one(HttpFile(location), target, force)
        return
    files = _file_system(location, target)

    def describe() -> dict[str, Any]:
        with asking(location):
            return files.info(path.rstrip("/"))

    info = patiently(describe, location)
    if info["type"] == "directory":
        _download_folder(files, info["name"].rstrip("/"), target, location, force)
    else:
        _fetch_one(FsspecFile(files, info["name"], location), target, force)


def _fetch_one(remote: Remote, target: Path, force: bool) -> None:
    there = 0 if force else size_of(partial_of(target))
    with ProgressBar(target.name, BYTES, done=there, after=1) as bar:
        fetch(remote, target, bar.show, force)


def _file_system(location: str, target: Path) -> Any:
    scheme = location.partition("://")[0]
    try:
        return fsspec.filesystem(scheme, skip_instance_cache=True)
    except ImportError as error:
        install = SCHEMES[scheme].install or "pip install --upgrade piston"
        raise ImportError(
            f"{location} needs a package that is not installed: {error}. Run: {install}\n"
            "Or " + _by_hand(location, target)
        ) from error


def _download_folder(files: Any, root: str, target: Path, location: str, force: bool) -> None:
    def listing() -> Infos:
        with asking(location):
            return files.find(root, detail=True)

    infos = _by_relative_path(patiently(listing, location), root, location)
    target.mkdir(parents=True, exist_ok=True)
    with _unfinished(target):
        _discard_outdated(infos, target, force)
        missing = [name for name in infos if not (target / name).exists()]
        there = sum(size_of(partial_of(target / name)) for name in missing)
        require_space(target, sum(infos[name]["size"] for name in missing) - there)
        _fetch_all(files, infos, target, location, force)


def _fetch_all(files: Any, infos: Infos, target: Path, location: str, force: bool) -> None:
    """Several files at a time: a checkpoint has hundreds, and most of them are small."""
    waiting = queue.SimpleQueue[str]()
    for name in sorted(infos):
        waiting.put(name)
    done = {name: size_of(target / name) or size_of(partial_of(target / name)) for name in infos}
    total = sum(info["size"] for info in infos.values())
    bar = ProgressBar(target.name, BYTES, total, done=sum(done.values()), after=1)
    stopped, failures = threading.Event(), list[Exception]()

    def fetch_one(name: str) -> None:
        def show(num_bytes: int, _: int | None) -> None:
            if stopped.is_set():
                raise _Stopped
            done[name] = num_bytes
            bar.show(sum(done.values()))

        with _lock(target / name, stopped):
            if not (target / name).is_file():
                remote = FsspecFile(files, infos[name]["name"], f"{location}/{name}")
                try:
                    fetch(remote, target / name, show, force)
                except Interrupted as interruption:
                    raise Interrupted(f"{name}: {interruption}") from interruption

    def work() -> None:
        try:
            while not stopped.is_set():
                fetch_one(waiting.get_nowait())
        except (queue.Empty, _Stopped):
            pass
        except Exception as error:
            failures.append(error)
            stopped.set()

    # Not an executor: Python would wait for its threads at exit, also for one that hangs.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(FILES_AT_ONCE)]
    try:
        with bar:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not stopped.wait(0.05):
                pass
    finally:
        stopped.set()  # also after Ctrl-C: the others end at their next bytes
    if failures:
        end = time.monotonic() + _SECONDS_TO_STOP
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0))
        raise failures[0]


class _Stopped(Exception):
    """Another file of the folder failed, or the user has stopped it."""


def _by_relative_path(listing: Infos, root: str, location: str) -> Infos:
    infos = {}
    for name, info in listing.items():
        # Object stores mark "folders" with empty objects whose names end in a slash.
        if info["type"] != "file" or name.endswith("/"):
            continue
        if not name.startswith(root + "/"):
            raise ValueError(f"{location}: its listing has {name!r}, which is not in {root!r}.")
        parts = _safe_parts(name[len(root) + 1 :], location)
        if parts[-1] not in (COMPLETE, INCOMPLETE):  # ours to write, not a remote's
            infos["/".join(parts)] = info
    if not infos:
        raise FileNotFoundError(f"{location} is a folder without any file.")
    return infos


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[None]:
    """Takes the marks of completeness away, also from folders around; puts them back at the end."""
    folders = [folder for folder in target.parents if (folder / COMPLETE).exists()]
    for folder in (target, *folders):
        if (folder / COMPLETE).exists():
            (folder / COMPLETE).replace(folder / INCOMPLETE)
    yield
    for folder in (target, *folders):
        (folder / INCOMPLETE).replace(folder / COMPLETE)


def _discard_outdated(infos: Infos, target: Path, force: bool) -> None:
    """Drops what an earlier attempt left of other versions, and notes the versions of this one."""
    note = target / INCOMPLETE
    earlier = json.loads((note.read_text() if note.exists() else "") or "{}")
    versions = {name: version_of(info) for name, info in infos.items()}
    for name in earlier.keys() | versions.keys():
        file, now = target / name, versions.get(name)
        if not file.exists():
            continue
        if force or earlier.get(name, now) != now or file.stat().st_size != infos[name]["size"]:
            logger.warning("Removing %s, to download it again", file)
            file.unlink()
    note.write_text(json.dumps(versions, indent=1))


def _by_hand(location: str, target: Path) -> str:
    scheme = SCHEMES[location.partition("://")[0]]
    mark = f"if it is a folder, with the mark that it is complete:\n    touch {{}}/{COMPLETE}\n"
    return (
        f"download it elsewhere, for example with\n    {scheme.by_hand(location)}\n"
        f"and put it at\n    {target}\n"
        + ("" if scheme.is_http else mark.format(shlex.quote(str(target))))
        + "It is then used as it is."
    )


def _hf_command(location: str) -> str:
    parts = _parts(location)
    kind = " --repo-type dataset" if parts[0] == "datasets" else ""
    owner, repository, *path = parts[1:] if kind else parts
    name, _, revision = repository.partition("@")
    command = f"hf download {owner}/{name}{kind}" + (f" --revision {revision}" if revision else "")
    return command + (f" --include '{'/'.join(path)}*'" if path else "") + f" --local-dir {name}"


_HTTP = Scheme(lambda location: f"curl -fLO {shlex.quote(location)}", is_http=True)
_GS = Scheme(
    lambda location: f"gcloud storage cp -r {shlex.quote(location)} .",
    install="pip install 'piston[gs]'",
)
SCHEMES = {"http": _HTTP, "https": _HTTP, "gs": _GS, "hf": Scheme(_hf_command)}
