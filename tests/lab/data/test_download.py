"""Downloads from a server on this machine: resumed, verified, from mirrors, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from equilibria.lab import data
from equilibria.lab.data.download import fetch_file, obtain, unpack
from equilibria.lab.data.files import Archive, File
from tests.lab.data.formats import random_bytes, write

CONTENT = random_bytes(700_000).numpy().tobytes()
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()


@dataclass
class Site:
    """The files of the test server, and its behaviour."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut: int | None = None  # bytes after which the connection ends, once
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and range

    def url(self, path: str) -> str:
        return self.address + path


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    found = Site()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            found.asked.append((self.path, wanted))
            content = found.files.get(self.path)
            if content is None:
                return self.send_error(404)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and found.ranges else 0
            if start >= len(content) > 0:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                return self.end_headers()
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            body, found.cut = content[start:][: found.cut], None
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("no_proxy", "*")
    found.address = f"http://127.0.0.1:{server.server_port}/"
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def nowhere() -> str:
    """Return an address where no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/a"


def part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def test_progress_ends_with_the_total_size(tmp_path: Path, site: Site) -> None:
    site.files["/a"] = CONTENT
    calls: list[tuple[str, int, int | None]] = []
    fetch_file([site.url("a")], tmp_path / "x" / "a", MD5, lambda *call: calls.append(call))
    assert (tmp_path / "x" / "a").read_bytes() == CONTENT and not part(tmp_path / "x" / "a").exists()
    assert calls[-1] == ("a", len(CONTENT), len(CONTENT)) and len(calls) > 1
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_an_interrupted_transfer_is_resumed(tmp_path: Path, site: Site) -> None:
    site.files["/a"], site.cut = CONTENT, 300_000
    target = tmp_path / "a"
    with pytest.raises(data.DataError, match="stopped after 300,000 of 700,000 bytes"):
        fetch_file([site.url("a")], target, MD5)
    assert not target.exists() and part(target).stat().st_size == 300_000
    first: list[int] = []
    fetch_file([site.url("a")], target, MD5, lambda name, done, total: first.append(done))
    assert target.read_bytes() == CONTENT and first[0] > 300_000
    assert [wanted for _, wanted in site.asked] == [None, "bytes=300000-"]


def test_another_mirror_resumes_the_transfer_of_the_first(tmp_path: Path, site: Site) -> None:
    site.files["/a"] = site.files["/b"] = CONTENT
    site.cut = 300_000
    fetch_file([nowhere(), site.url("none"), site.url("a"), site.url("b")], tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT
    assert site.asked == [("/none", None), ("/a", None), ("/b", "bytes=300000-")]


def test_a_server_without_ranges_sends_all_again(tmp_path: Path, site: Site) -> None:
    site.files["/a"], site.ranges = CONTENT, False
    write(part(tmp_path / "a"), CONTENT[:1000])
    fetch_file([site.url("a")], tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_part_that_is_complete_is_not_fetched_again(tmp_path: Path, site: Site) -> None:
    site.files["/a"] = CONTENT
    write(part(tmp_path / "a"), CONTENT)
    fetch_file([site.url("a")], tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT and len(site.asked) == 1


@pytest.mark.parametrize("stale", [b"x" * 1000, CONTENT + b"more", b"x" * len(CONTENT)])
def test_a_part_of_another_file_is_discarded(tmp_path: Path, site: Site, stale: bytes) -> None:
    site.files["/a"] = CONTENT
    write(part(tmp_path / "a"), stale)
    fetch_file([site.url("a")], tmp_path / "a", MD5)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_no_file(tmp_path: Path, site: Site) -> None:
    site.files["/a"] = b"something else"
    with pytest.raises(data.DataError, match=f"its md5 is [0-9a-f]+ instead of {MD5[4:]}"):
        fetch_file([site.url("a")], tmp_path / "a", MD5)
    assert list(tmp_path.iterdir()) == []


def test_every_address_that_failed_is_named(tmp_path: Path, site: Site) -> None:
    dead = nowhere()
    with pytest.raises(data.DataError) as caught:
        fetch_file([dead, site.url("none")], tmp_path / "a", MD5)
    refused, missing = str(caught.value).split("\n")
    assert refused.startswith(f"{dead}: ") and "refused" in refused
    assert missing == f"{site.url('none')}: HTTP Error 404: Not Found"


# archives


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


MEMBERS = {"set//a.txt": b"a", "set/b.txt": CONTENT, "../../evil.txt": b"evil"}


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_members_are_found_by_base_name_and_written_to_the_given_paths(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    archive = write(tmp_path / "in" / "archive", pack(MEMBERS))
    wanted = {name: tmp_path / "in" / "out" / name for name in ("a.txt", "b.txt", "evil.txt")}
    unpack(archive, wanted)
    assert {path.name: path.read_bytes() for path in (tmp_path / "in" / "out").iterdir()} == {
        "a.txt": b"a",
        "b.txt": CONTENT,
        "evil.txt": b"evil",
    }
    assert not (tmp_path / "evil.txt").exists()
    with pytest.raises(data.DataError, match=r"does not hold c\.txt"):
        unpack(archive, {"c.txt": tmp_path / "c.txt"})


def spoiled(content: bytes) -> bytes:
    """Return a zip file whose members fail their checksums."""
    return content.replace(CONTENT[1000:1010], b"0123456789")


@pytest.mark.parametrize(
    "content", [b"", b"<html>", tarred(MEMBERS)[:5000], zipped(MEMBERS)[:5000], spoiled(zipped(MEMBERS))]
)
def test_a_damaged_archive_is_named_and_leaves_no_member(tmp_path: Path, content: bytes) -> None:
    archive = write(tmp_path / "archive", content)
    with pytest.raises(data.DataError, match="archive is damaged or no archive"):
        unpack(archive, {"b.txt": tmp_path / "b.txt"})
    assert list(tmp_path.iterdir()) == [archive]


def archived(site: Site, content: bytes) -> list[File]:
    site.files["/set.zip"] = content
    archive = Archive("set.zip", (site.url("set.zip"),), "md5:" + hashlib.md5(content).hexdigest())
    return [File(f"set/{name}", archive=archive) for name in ("a.txt", "b.txt")]


def test_files_of_an_archive_are_fetched_together_and_the_archive_is_removed(tmp_path: Path, site: Site) -> None:
    files = archived(site, zipped(MEMBERS))
    paths = obtain("some", files, tmp_path)
    assert {name: path.read_bytes() for name, path in paths.items()} == {"a.txt": b"a", "b.txt": CONTENT}
    assert len(site.asked) == 1 and [path.name for path in tmp_path.iterdir()] == ["set"]
    obtain("some", files, tmp_path)
    assert len(site.asked) == 1


def test_an_archive_that_was_put_there_by_hand_is_used_and_kept(tmp_path: Path, site: Site) -> None:
    files = archived(site, zipped(MEMBERS))
    write(tmp_path / "set.zip", zipped(MEMBERS))
    obtain("some", files, tmp_path)
    assert site.asked == [] and (tmp_path / "set.zip").exists()


# the error without a network


def test_the_error_names_files_places_and_addresses(tmp_path: Path) -> None:
    dead = nowhere()
    files = [
        File("set/one.gz", (f"{dead}/one.gz",), also=("other/one",)),
        File("set/two.gz", (f"{dead}/two.gz",)),
        File("set/three.txt", archive=Archive("set.zip", (f"{dead}/set.zip",))),
    ]
    write(tmp_path / "set" / "two.gz", b"is there")
    with pytest.raises(data.DataError) as caught:
        obtain("some", files, tmp_path)
    message = str(caught.value)
    assert f"some needs files that are not in {tmp_path}" in message
    for expected in (
        "set/one.gz, or other/one",
        "set/three.txt",
        "set.zip, an archive",
        f"{dead}/<file>",
        f"{dead}/set.zip",
    ):
        assert expected in message
    assert "two.gz" not in message and "refused" in message and "EQUILIBRIA_DATA" in message


def test_no_download_unless_allowed(tmp_path: Path, site: Site) -> None:
    site.files["/a"] = CONTENT
    with pytest.raises(data.DataError, match="download=False"):
        obtain("some", [File("a", (site.url("a"),))], tmp_path, download=False)
    assert site.asked == []


def test_processes_that_start_together_fetch_once(tmp_path: Path, site: Site) -> None:
    pytest.importorskip("fcntl")
    site.files["/a"] = CONTENT
    files = [File("a", (site.url("a"),), MD5)]
    ranks = [threading.Thread(target=obtain, args=("some", files, tmp_path)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(site.asked) == 1 and (tmp_path / "a").read_bytes() == CONTENT
