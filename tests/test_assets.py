"""Downloads against real servers on this machine that break, change, and refuse."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from piston import assets

CONTENT = bytes(range(256)) * 1024  # 256 KiB
OTHER = CONTENT[::-1]
UNFINISHED = (".piston-partial.", ".piston-version.")


class Server(http.server.ThreadingHTTPServer):
    """Serves `content` at every path, with the faults that a test asks for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.ranges = True
        self.shift = 0  # bytes by which a range begins later than asked for
        # or "chunked", or "close": no length, the end is the end; else the header as it is
        self.length = "plain"
        self.etag = True
        self.encoding = ""
        self.break_after: dict[int, int] = {}  # number of the request → bytes until it breaks off
        self.change_to: dict[int, bytes] = {}  # number of the request → content from then on
        self.status: dict[int, int] = {}  # number of the request → an error instead
        self.delay = 0.0  # seconds between pieces
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.sent = 0

    def location(self, path: str = "files/model.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server, number = self.server, len(self.server.requests)
        asked = self.headers["Range"]
        server.requests.append((self.path, asked))
        server.content = server.change_to.get(number, server.content)
        content, self.close_connection = server.content, True
        if number in server.status or "absent" in self.path:
            self.send_error(server.status.get(number, 404))
            return
        start, end = 0, len(content)
        partly = re.fullmatch(r"bytes=(\d+)-(\d*)", asked or "") if server.ranges else None
        if partly:
            start, end = int(partly[1]) + server.shift, min(int(partly[2] or end) + 1, end)
        if partly and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if partly else 200)
        if partly:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        if server.etag:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        if server.encoding:
            self.send_header("Content-Encoding", server.encoding)
        if server.length == "plain":
            self.send_header("Content-Length", str(end - start))
        elif server.length == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif server.length != "close":
            self.send_header("Content-Length", server.length)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self._send(content[start:end], server.break_after.get(number))

    def _send(self, body: bytes, limit: int | None) -> None:
        for begin in range(0, len(body[:limit]), 16384):
            piece = body[:limit][begin : begin + 16384]
            if self.server.length == "chunked":
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            else:
                self.wfile.write(piece)
            self.server.sent += len(piece)
            time.sleep(self.server.delay)
        if self.server.length == "chunked" and limit is None:
            self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PISTON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(assets, "BACKOFF", 0.01)
    return tmp_path / "home"


def leftovers(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.name.startswith(UNFINISHED)]


# Locations


def test_local_paths_are_returned_as_they_are(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "a b.json"
    file.write_text("{}")
    assert assets.resolve(file) == assets.resolve(str(file)) == file
    assert assets.resolve(file.as_uri()) == file
    assert assets.resolve(tmp_path) == tmp_path
    assert not home.exists()


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert assets.home() == tmp_path / "home"
    monkeypatch.delenv("PISTON_HOME")
    assert assets.home() == Path.home() / ".cache" / "piston"


@pytest.mark.parametrize(
    ("location", "error", "said"),
    [
        ("no/such/file", FileNotFoundError, "no/such/file does not exist"),
        ("file:///no/such/file", FileNotFoundError, "/no/such/file does not exist"),
        ("file://elsewhere/x", ValueError, "elsewhere"),
        ("s3://bucket/x", ValueError, "Known: a local path, file://, http://, https://, gs://, hf"),
        ("gs://bucket", ValueError, "too short"),
        ("hf://gpt2", ValueError, "hf://owner/name"),
        ("hf://datasets/owner", ValueError, "hf://datasets/owner/name"),
        ("http://host/folder/", ValueError, "http://host/path/to/file"),
        ("http://host/../../x", ValueError, "lead out of the cache"),
        ("hf://owner/name/../../../x", ValueError, "lead out of the cache"),
    ],
)
def test_wrong_locations_say_what_is_wrong(
    location: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as raised:
        assets.resolve(location)
    assert said in str(raised.value)


# HTTP


def test_downloads_once(server: Server, home: Path) -> None:
    path = assets.resolve(server.location())
    assert path == home / f"assets/http/127.0.0.1:{server.server_port}/files/model.bin"
    assert path.read_bytes() == CONTENT
    assert assets.resolve(server.location()) == path
    assert len(server.requests) == 1
    assert not leftovers(home)


def test_queries_are_different_files(server: Server) -> None:
    one, two = (assets.resolve(server.location(f"get?file=a/{n}")) for n in "12")
    assert [one.name, two.name] == ["get?file=a%2F1", "get?file=a%2F2"]
    assert len(assets.resolve(server.location("get?signed=" + "x" * 500)).name) < 100


def test_unusual_characters_in_urls(server: Server) -> None:
    assert assets.resolve(server.location("π0 model.bin#part")).read_bytes() == CONTENT
    assert server.requests == [("/%CF%800%20model.bin", "bytes=0-")]


def test_goes_on_after_breaking_off(
    server: Server, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.break_after = {0: 100_000, 1: 50_000, 2: 0}
    with caplog.at_level(logging.WARNING):
        assert assets.resolve(server.location()).read_bytes() == CONTENT
    ranges = [asked for _, asked in server.requests]
    assert ranges == ["bytes=0-", "bytes=100000-", "bytes=150000-", "bytes=150000-"]
    assert server.sent == len(CONTENT)
    assert "got 100000 bytes of 262144" in caplog.text
    assert not leftovers(home)


def test_as_many_attempts_as_there_is_progress(server: Server) -> None:
    server.break_after = dict.fromkeys(range(12), 20_000)
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert len(server.requests) == 13


def test_the_next_call_goes_on(server: Server, home: Path) -> None:
    server.break_after = {0: 100_000, **dict.fromkeys(range(1, 100), 0)}
    with pytest.raises(assets.DownloadError) as raised:
        assets.resolve(server.location())
    target = home / f"assets/http/127.0.0.1:{server.server_port}/files/model.bin"
    assert not target.exists()
    assert f"curl -fLO {server.location()}" in str(raised.value)
    assert f"\n    {target}\n" in str(raised.value)
    server.break_after = {}
    server.requests.clear()
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert server.requests[0][1] == "bytes=100000-"


@pytest.mark.parametrize("length", ["plain", "chunked"])
def test_server_without_ranges_starts_over(server: Server, length: str) -> None:
    server.ranges, server.length = False, length
    server.break_after = {0: 100_000, 1: 200_000}
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert server.sent == 300_000 + len(CONTENT)


def test_server_without_ranges_that_always_breaks_is_given_up(server: Server) -> None:
    server.ranges = False
    server.break_after = dict.fromkeys(range(100), 100_000)
    with pytest.raises(assets.DownloadError):
        assets.resolve(server.location())
    assert len(server.requests) == assets.ATTEMPTS


@pytest.mark.parametrize("length", ["chunked", "close"])
def test_server_without_content_length(server: Server, length: str) -> None:
    server.length = length
    assert assets.resolve(server.location()).read_bytes() == CONTENT


@pytest.mark.parametrize("length", ["chunked", "close"])
def test_a_body_without_length_that_is_cut_off_is_not_complete(server: Server, length: str) -> None:
    server.length, server.break_after = length, {0: 100_000, 1: 50_000}
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert len(server.requests) == 3


def test_where_no_size_is_told_the_log_says_so(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.length, server.ranges = "close", False
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert "the server does not state the size" in caplog.text


@pytest.mark.parametrize("length", ["many", "-5", "1e3"])
def test_a_length_that_is_no_number(server: Server, length: str) -> None:
    server.length, server.ranges = length, False
    with pytest.raises(assets.DownloadError, match=f"Content-Length is '{length}'; expected a num"):
        assets.resolve(server.location())


def test_what_is_not_the_file_itself_is_not_kept(server: Server) -> None:
    """A server that prepares the file, has none, or compresses it unasked."""
    server.status = {0: 202, 1: 204}
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    server.encoding = "gzip"
    with pytest.raises(assets.DownloadError, match="the encoding gzip; expected the file itself"):
        assets.resolve(server.location("other"))


def test_a_wrong_range_is_not_used(server: Server) -> None:
    server.shift, server.break_after = 5, {1: 100_000}
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == ["bytes=0-", None, "bytes=100000-", None]


@pytest.mark.parametrize("ranges", [True, False])
def test_an_empty_file(server: Server, ranges: bool) -> None:
    server.content, server.ranges = b"", ranges
    assert assets.resolve(server.location()).read_bytes() == b""


@pytest.mark.parametrize(
    "changed", [OTHER, OTHER + b"longer", OTHER[:150_000], OTHER[:50_000]], ids=len
)
@pytest.mark.parametrize("ranges", [True, False])
def test_never_glues_two_versions(server: Server, changed: bytes, ranges: bool) -> None:
    server.ranges = ranges
    server.break_after, server.change_to = {0: 100_000}, {1: changed}
    assert assets.resolve(server.location()).read_bytes() == changed


@pytest.mark.parametrize("changed", [OTHER, OTHER + b"longer"], ids=len)
def test_without_a_version_a_download_starts_again(server: Server, changed: bytes) -> None:
    server.etag = False
    server.break_after, server.change_to = {0: 100_000}, {1: changed}
    assert assets.resolve(server.location()).read_bytes() == changed
    assert [asked for _, asked in server.requests] == ["bytes=0-", "bytes=0-"]


def test_names_of_unfinished_files_do_not_collide(server: Server) -> None:
    server.break_after = {1: 100_000}
    other = assets.resolve(server.location("files/model.bin.partial"))
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert other.read_bytes() == CONTENT
    assert assets.resolve(server.location("files/model.bin.partial")) == other
    for name in (*UNFINISHED, assets.COMPLETE):
        with pytest.raises(ValueError, match="Piston's own"):
            assets.resolve(server.location(f"files/{name}model.bin"))


def test_https_never_leads_to_http() -> None:
    follow = assets._EncryptedRedirects().redirect_request
    found = http.client.HTTPMessage()
    for scheme, address in (
        ("http", "http://b/c"),
        ("http", "https://b/c"),
        ("https", "https://b"),
    ):
        request = urllib.request.Request(f"{scheme}://a/b")
        assert follow(request, None, 302, "Found", found, address).full_url == address
    with pytest.raises(assets.InsecureRedirect, match="http://b/c: not encrypted"):
        follow(urllib.request.Request("https://a/b"), None, 302, "Found", found, "http://b/c")


def test_partial_of_unknown_version_is_not_trusted(server: Server, home: Path) -> None:
    target = home / f"assets/http/127.0.0.1:{server.server_port}/files/model.bin"
    target.parent.mkdir(parents=True)
    target.with_name(".piston-partial.model.bin").write_bytes(b"who knows")
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert server.requests == [("/files/model.bin", "bytes=0-")]


def test_not_there(server: Server, home: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.bin is not there.*404"):
        assets.resolve(server.location("absent.bin"))
    assert len(server.requests) == 1
    assert not leftovers(home)


def test_no_access_is_not_tried_again(server: Server) -> None:
    server.status = {0: 403}
    with pytest.raises(PermissionError, match="No access to http://.*403"):
        assets.resolve(server.location())
    assert len(server.requests) == 1


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.status = {0: 503, 1: 429}
    assert assets.resolve(server.location()).read_bytes() == CONTENT


def test_put_there_by_hand_needs_no_network(home: Path) -> None:
    target = home / "assets/https/example.invalid/model.bin"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"mine")
    assert assets.resolve("https://example.invalid/model.bin").read_bytes() == b"mine"
    assert assets.resolve("HTTPS://example.invalid/model.bin") == target


def test_force_downloads_again_and_keeps_the_old_until_then(server: Server) -> None:
    path = assets.resolve(server.location())
    server.content = OTHER
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    server.status = {1: 404}
    with pytest.raises(FileNotFoundError):
        assets.resolve(server.location(), force=True)
    assert path.read_bytes() == CONTENT
    assert assets.resolve(server.location(), force=True).read_bytes() == OTHER


def test_full_disk_is_seen_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(assets.shutil, "disk_usage", lambda _: full)
    with pytest.raises(OSError, match=r"262\.1 kB to download, but only 1\.0 kB free.*PISTON_HOME"):
        assets.resolve(server.location())


def test_file_where_the_cache_has_a_folder(server: Server) -> None:
    assets.resolve(server.location("a/b"))
    with pytest.raises(IsADirectoryError, match="Remove the folder"):
        assets.resolve(server.location("a"))


# Several processes


def resolve_in_process(
    location: str, together: threading.Barrier, results: multiprocessing.Queue[str]
) -> None:
    together.wait()
    results.put(str(assets.resolve(location)))


def test_two_processes_download_once(server: Server) -> None:
    server.delay = 0.03
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(2, timeout=20), context.Queue()
    processes = [
        context.Process(target=resolve_in_process, args=(server.location(), together, results))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = {results.get(timeout=20) for _ in processes}
    for process in processes:
        process.join()
    assert [Path(path).read_bytes() for path in found] == [CONTENT]
    assert server.requests == [("/files/model.bin", "bytes=0-")]
    assert server.sent == len(CONTENT)


def test_killed_in_the_middle(server: Server, home: Path) -> None:
    server.delay = 0.2
    code = "import sys; from piston import assets; assets.resolve(sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, server.location()])
    deadline = time.monotonic() + 20
    while not any(path.stat().st_size > 50_000 for path in leftovers(home)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (partial,) = (path for path in leftovers(home) if path.name.startswith(".piston-partial."))
    arrived = partial.stat().st_size
    assert 50_000 < arrived < len(CONTENT)
    server.delay = 0.0
    assert assets.resolve(server.location()).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == ["bytes=0-", f"bytes={arrived}-"]
    assert not leftovers(home)


# Any fsspec file system; gs:// and hf:// take the same way


class Bucket(MemoryFileSystem):
    """fsspec's files in memory, which break off when a test asks for it."""

    protocol = "bucket"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    cachable = False
    unreachable = False
    fail_at: ClassVar[Callable[[str, int], bool]] = lambda *_: False
    reads: ClassVar[list[tuple[str, int]]] = []

    def info(self, path: str, **kwargs: object) -> dict:
        if Bucket.unreachable:
            raise ConnectionError("no route to host")
        return super().info(path, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: object) -> object:
        file = super()._open(path, mode, **kwargs)
        if mode == "rb":
            file.read = functools.partial(self._read, file, file.read)
        return file

    def _read(self, file: object, read: Callable[[int], bytes], length: int = -1) -> bytes:
        start = file.tell()
        Bucket.reads.append((file.path, start))
        if Bucket.fail_at(file.path, start):
            raise TimeoutError("the line went dead")
        return read(length)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    monkeypatch.setitem(assets.SCHEMES, "bucket", lambda location: f"get {location}")
    monkeypatch.setattr(assets, "SMALLEST_READ", 1000)
    monkeypatch.setattr(assets, "LARGEST_READ", 4000)
    for name in ("unreachable", "fail_at"):
        monkeypatch.setattr(Bucket, name, getattr(Bucket, name))
    Bucket.reads.clear()
    files = Bucket()
    for name in ("model/params/a", "model/params/deep/b", "model/stats.json", "other"):
        files.pipe_file(f"/things/{name}", (name * 3000).encode())
    yield files
    Bucket.store.clear()
    Bucket.pseudo_dirs[:] = [""]


def content_of(folder: Path) -> dict[str, bytes]:
    files = {path for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def expected(*names: str) -> dict[str, bytes]:
    return {name: f"model/{name}".encode() * 3000 for name in names}


ALL = ("params/a", "params/deep/b", "stats.json")


def finished(folder: Path) -> dict[str, bytes]:
    content = content_of(folder)
    assert set(json.loads(content.pop(assets.COMPLETE))) == set(content)
    return content


@pytest.mark.usefixtures("bucket")
def test_one_file_of_a_file_system(home: Path) -> None:
    path = assets.resolve("bucket://things/other")
    assert path == home / "assets/bucket/things/other"
    assert path.read_bytes() == b"other" * 3000
    starts = [start for _, start in Bucket.reads]
    assert starts == [0, 1000, 3000, 7000, 11000, 15000]  # larger and larger, up to a limit


@pytest.mark.usefixtures("bucket")
def test_file_of_a_file_system_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True, True])
    monkeypatch.setattr(Bucket, "fail_at", lambda _, start: start == 3000 and next(failures, False))
    assert assets.resolve("bucket://things/other").read_bytes() == b"other" * 3000
    assert [start for _, start in Bucket.reads].count(0) == 1


def test_file_of_a_file_system_that_changes(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_and_change(path: str, start: int) -> bool:
        if start != 3000 or bucket.cat_file(path).startswith(b"x"):
            return False
        bucket.pipe_file(path, b"x" * 15000)
        return True

    monkeypatch.setattr(Bucket, "fail_at", fail_and_change)
    assert assets.resolve("bucket://things/other").read_bytes() == b"x" * 15000


@pytest.mark.usefixtures("bucket")
def test_folder(home: Path) -> None:
    folder = assets.resolve("bucket://things/model/")
    assert folder == home / "assets/bucket/things/model"
    assert finished(folder) == expected(*ALL)
    Bucket.unreachable = True
    assert assets.resolve("bucket://things/model") == folder
    assert assets.resolve("bucket://things/model/params") == folder / "params"
    assert assets.resolve("bucket://things/model/params/a") == folder / "params/a"


@pytest.mark.usefixtures("bucket")
def test_files_of_a_folder_come_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    all_begun = threading.Barrier(len(ALL), timeout=20)

    def wait_for_the_others(_: str, start: int) -> bool:
        if start == 0:
            all_begun.wait()
        return False

    monkeypatch.setattr(Bucket, "fail_at", wait_for_the_others)
    assert finished(assets.resolve("bucket://things/model")) == expected(*ALL)


@pytest.mark.usefixtures("bucket")
def test_a_file_that_fails_stops_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is the last one. They keep what they have, for the next time."""
    half_done, failed = threading.Event(), threading.Event()

    def deny(path: str, start: int) -> bool:
        if path.endswith("stats.json"):
            assert half_done.wait(20)
            failed.set()
            raise PermissionError("not yours")
        if path.endswith("b") and start == 3000:
            half_done.set()
            assert failed.wait(20)
            time.sleep(0.5)
        return False

    monkeypatch.setattr(Bucket, "fail_at", deny)
    with pytest.raises(PermissionError, match="not yours"):
        assets.resolve("bucket://things/model")
    folder = assets.home() / "assets/bucket/things/model"
    assert (folder / "params/deep/.piston-partial.b").stat().st_size == 7000
    assert ("/things/model/params/deep/b", 7000) not in Bucket.reads


@pytest.mark.usefixtures("bucket")
def test_a_folder_waits_for_another_process_until_something_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = assets.home() / "assets/bucket/things/model"

    def deny(path: str, _: int) -> bool:
        if path.endswith("b"):
            while "Waiting for another process" not in caplog.text:
                time.sleep(0.01)
            raise PermissionError("not yours")
        return False

    monkeypatch.setattr(Bucket, "fail_at", deny)
    begun = time.monotonic()
    with (
        assets._lock(folder / "params/a"),  # as another process would hold it
        pytest.raises(PermissionError, match="not yours"),
    ):
        assets.resolve("bucket://things/model")
    assert time.monotonic() - begun < 20


@pytest.mark.usefixtures("bucket")
def test_part_of_a_folder_is_not_the_folder() -> None:
    one = assets.resolve("bucket://things/model/params/a")
    os.utime(one, (0, 0))
    assert finished(assets.resolve("bucket://things/model")) == expected(*ALL)
    assert one.stat().st_mtime == 0, "what was there already was downloaded again"


@pytest.mark.usefixtures("bucket")
def test_interrupted_folder_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "fail_at", lambda path, start: path.endswith("b") and start > 2000)
    with pytest.raises(assets.DownloadError, match="the line went dead"):
        assets.resolve("bucket://things/model")
    folder = assets.home() / "assets/bucket/things/model"
    assert not (folder / assets.COMPLETE).exists()
    monkeypatch.setattr(Bucket, "fail_at", lambda *_: False)
    Bucket.reads.clear()
    assert assets.resolve("bucket://things/model") == folder
    assert finished(folder) == expected(*ALL)
    assert Bucket.reads[0] == ("/things/model/params/deep/b", 3000)


def test_interrupted_folder_that_changes(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bucket, "fail_at", lambda path, start: path.endswith("b") and start > 2000)
    with pytest.raises(assets.DownloadError):
        assets.resolve("bucket://things/model")
    monkeypatch.setattr(Bucket, "fail_at", lambda *_: False)
    same_size = b"y" * len(bucket.cat_file("/things/model/params/a"))
    bucket.pipe_file("/things/model/params/a", same_size)
    assert finished(assets.resolve("bucket://things/model"))["params/a"] == same_size


def test_force_replaces_a_folder(bucket: Bucket) -> None:
    folder = assets.resolve("bucket://things/model")
    (folder / "params/a").write_text("corrupted")
    (folder / "notes.txt").write_text("mine")
    bucket.rm("/things/model/stats.json")
    assets.resolve("bucket://things/model", force=True)
    content = content_of(folder)
    del content[assets.COMPLETE]
    assert content == {**expected("params/a", "params/deep/b"), "notes.txt": b"mine"}


@pytest.mark.usefixtures("bucket")
def test_force_on_a_part_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = assets.resolve("bucket://things/model")
    monkeypatch.setattr(Bucket, "fail_at", lambda path, _: path.endswith("b"))
    with pytest.raises(assets.DownloadError):
        assets.resolve("bucket://things/model/params", force=True)
    with pytest.raises(assets.DownloadError):  # it now lacks a file, and must not claim otherwise
        assets.resolve("bucket://things/model")
    monkeypatch.setattr(Bucket, "fail_at", lambda *_: False)
    assets.resolve("bucket://things/model/params")
    assert (folder / "params" / assets.COMPLETE).exists()
    assets.resolve("bucket://things/model")
    assert {name: content_of(folder)[name] for name in ALL} == expected(*ALL)


@pytest.mark.usefixtures("bucket")
def test_folder_put_there_by_hand(home: Path) -> None:
    folder = home / "assets/bucket/things/model"
    folder.mkdir(parents=True)
    (folder / "stats.json").write_text("mine")
    Bucket.unreachable = True
    with pytest.raises(assets.DownloadError) as raised:
        assets.resolve("bucket://things/model")
    touch = re.search(r"touch (.*)", str(raised.value))
    assert touch is not None
    subprocess.run(["touch", touch[1]], check=True)
    assert (assets.resolve("bucket://things/model") / "stats.json").read_text() == "mine"


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("name", ["/things/model/../../../evil", "/things/model/a\\..\\evil"])
def test_listings_cannot_lead_out(home: Path, name: str) -> None:
    Bucket.store[name] = Bucket.store["/things/other"]
    with pytest.raises(ValueError, match="lead out of the cache"):
        assets.resolve("bucket://things/model")
    assert not list(home.rglob("*evil*"))


def test_listings_cannot_claim_completeness(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.pipe_file(f"/things/model/{assets.COMPLETE}", b"{}")
    monkeypatch.setattr(Bucket, "fail_at", lambda path, _: path.endswith("a"))
    for _ in range(2):
        with pytest.raises(assets.DownloadError):
            assets.resolve("bucket://things/model")


@pytest.mark.usefixtures("bucket")
def test_folder_needs_room_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(map(len, expected(*ALL).values()))
    usage = type("Usage", (), {"free": total - 1})
    monkeypatch.setattr(assets.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="to download, but only"):
        assets.resolve("bucket://things/model")
    usage.free = total
    assert assets.resolve("bucket://things/model").is_dir()


@pytest.mark.usefixtures("bucket")
def test_not_in_the_bucket() -> None:
    with pytest.raises(FileNotFoundError, match="bucket://things/absent is not there"):
        assets.resolve("bucket://things/absent")


# gs:// and hf:// themselves


def test_gs_without_its_package(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    for name in ("gs", "gcs"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, name, raising=False)
    with pytest.raises(ImportError) as raised:
        assets.resolve("gs://openpi-assets/checkpoints/pi0_base")
    assert "pip install 'piston[gs]'" in str(raised.value)
    assert str(home / "assets/gs/openpi-assets/checkpoints/pi0_base") in str(raised.value)


HF_HUB = {"model.bin": CONTENT, "stats/norm_stats.json": b'{"mean": 0}', "README.md": b""}


class HubHandler(Handler):
    """As much of the Hugging Face Hub as one repository needs."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"(?:/datasets)?/robot/stuff/resolve/main/(.*)", path):
            self.server.content = HF_HUB[found[1]]
            super().do_GET()
            return
        self.server.requests.append((path, None))
        if found := re.fullmatch(r"/api/(?:models|datasets)/robot/stuff/tree/main/?(.*)", path):
            self._answer([entry for entry in self._tree() if entry["path"].startswith(found[1])])
        elif re.fullmatch(r"/api/(models|datasets)/robot/stuff(/revision/main)?", path):
            self._answer({"id": "robot/stuff", "sha": "0" * 40, "siblings": [], "private": False})
        else:
            self.send_error(404)

    def _tree(self) -> list[dict]:
        recursive = "recursive=true" in self.path.lower()
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": f"oid-{name}"}
            for name, content in HF_HUB.items()
            if recursive or "/" not in name or "/tree/main/stats" in self.path
        ]
        folder = {"type": "directory", "path": "stats", "size": 0, "oid": "tree-stats"}
        return files if "/tree/main/stats" in self.path else [*files, folder]

    def _answer(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def resolve_hf(endpoint: str, *locations: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the Hub's address is read when its package is imported."""
    code = """if True:
        import sys
        from piston import assets
        assets.BACKOFF = 0.01
        for location in sys.argv[1:]:
            assets.resolve(location)
    """
    return subprocess.run(
        [sys.executable, "-c", code, *locations],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("kind", ["", "datasets/"])
def test_hf(server: Server, home: Path, kind: str) -> None:
    server.RequestHandlerClass = HubHandler
    file, folder = f"hf://{kind}robot/stuff/model.bin", f"hf://{kind}robot/stuff"
    result = resolve_hf(server.location("").rstrip("/"), file, folder)
    assert result.returncode == 0, result.stderr
    assert finished(home / "assets" / "hf" / kind / "robot" / "stuff") == HF_HUB


def test_hf_not_there(server: Server) -> None:
    server.RequestHandlerClass = HubHandler
    result = resolve_hf(server.location("").rstrip("/"), "hf://robot/stuff/absent.bin")
    assert "FileNotFoundError: hf://robot/stuff/absent.bin is not there" in result.stderr


def test_hf_offline(home: Path) -> None:
    location = "hf://datasets/lerobot/aloha@v2.1/meta/info.json"
    result = resolve_hf("http://127.0.0.1:9", location)
    assert f"DownloadError: Could not download {location}" in result.stderr
    assert (
        "hf download lerobot/aloha --repo-type dataset --revision v2.1 "
        "--include 'meta/info.json*' --local-dir aloha\n"
    ) in result.stderr
    target = home / "assets/hf/datasets/lerobot/aloha@v2.1/meta/info.json"
    assert f"\n    {target}\n" in result.stderr
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("{}")
    assert resolve_hf("http://127.0.0.1:9", location).returncode == 0
