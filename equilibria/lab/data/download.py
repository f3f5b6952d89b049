"""Download missing files: mirrors are tried in turn, transfers resumed, and files moved into place once verified."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from equilibria._core.files import atomic
from equilibria.lab.data.files import CHUNK, DataError, File, alone, digest, matches

# progress(file name, bytes so far, total bytes or None if the server does not send it)
Progress = Callable[[str, int, int | None], None]

TIMEOUT = 30  # seconds without data after which a transfer fails


def obtain(
    name: str,
    files: Sequence[File],
    root: Path,
    progress: Progress | None = None,
    *,
    download: bool = True,
    manual: str = "",
) -> dict[str, Path]:
    """Return the paths of a dataset's files by base name; missing files are fetched.

    Raises DataError with the files, their addresses and the folder if they cannot be fetched.
    """
    if any(file.locate(root) is None for file in files):
        reason = _fetch_missing(files, root, progress) if download else "download=False"
        missing = [file for file in files if file.locate(root) is None]
        if missing:
            raise DataError(_explain(name, missing, root, reason, manual))
    return {file.name: place for file in files if (place := file.locate(root))}


def fetch_file(urls: Sequence[str], target: Path, checksum: str = "", progress: Progress | None = None) -> None:
    """Download `target` from the first address that delivers it; `.part` holds the data until it is verified."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    failures = []
    for url in urls:
        try:
            _fetch_verified(
                url, part, checksum, lambda done, total: progress(target.name, done, total) if progress else None
            )
            os.replace(part, target)
            return
        except (OSError, HTTPException, DataError) as error:
            reason = error.reason if type(error) is URLError else error
            failures.append(f"{url}: {reason or type(error).__name__}")
    raise DataError("\n".join(failures))


def unpack(archive: Path, wanted: Mapping[str, Path]) -> None:
    """Write the members of a zip or tar file with these base names to these paths."""
    found = set()
    try:
        for name, member in _members(archive):
            if name in wanted and name not in found:
                with atomic(wanted[name]) as out:
                    shutil.copyfileobj(member, out, CHUNK)
                found.add(name)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or no archive: {error}. Delete it and fetch it again.") from error
    if absent := sorted(set(wanted) - found):
        raise DataError(f"{archive} does not hold {', '.join(absent)}: it is another version. Delete it and fetch it again.")


def _fetch_missing(files: Sequence[File], root: Path, progress: Progress | None) -> str:
    """Fetch missing files; returns the reason why some are still missing, or an empty text."""
    try:
        with alone(root):
            for file in files:
                if file.locate(root) is None:
                    _fetch(file, files, root, progress)
    except (DataError, OSError) as error:
        return str(error)
    return ""


def _fetch(file: File, files: Sequence[File], root: Path, progress: Progress | None) -> None:
    """Fetch one file, or the archive that holds it with all missing files of that archive."""
    if file.archive is None:
        if not file.urls:
            raise DataError("there is no address to fetch them from")
        return fetch_file(file.urls, root / file.path, file.checksum, progress)
    wanted = {f.name: root / f.path for f in files if f.archive == file.archive and f.locate(root) is None}
    place = root / file.archive.path
    brought_by_hand = place.is_file()
    if not brought_by_hand:
        fetch_file(file.archive.urls, place, file.archive.checksum, progress)
    unpack(place, wanted)
    if not brought_by_hand:
        place.unlink()


def _fetch_verified(url: str, part: Path, checksum: str, report: Callable[[int, int | None], None]) -> None:
    """Transfer a file and compare its checksum; a resumed file that is wrong is fetched once more from the beginning."""
    resumed = part.exists()
    _transfer(url, part, report)
    if matches(part, checksum):
        return
    algorithm, _, expected = checksum.partition(":")
    found = digest(part, algorithm)
    part.unlink()
    if not resumed:
        raise DataError(f"its {algorithm} is {found} instead of {expected}")
    # the part that an earlier run or another mirror left may be the wrong one
    _fetch_verified(url, part, checksum, report)


def _transfer(url: str, part: Path, report: Callable[[int, int | None], None]) -> None:
    """Download to `part`, after the bytes that it has already if the server supports ranges."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "equilibria"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        reply = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code != 416 or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":  # 416 for a file that is complete already
            return
        part.unlink()
        return _transfer(url, part, report)
    with reply:
        have = have if reply.status == 206 else 0  # 200: the server ignores ranges and sends the whole file
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length else None
        with open(part, "ab" if have else "wb") as out:
            while chunk := reply.read(CHUNK):
                out.write(chunk)
                have += len(chunk)
                report(have, total)
    if total is not None and have != total:
        raise DataError(f"the transfer stopped after {have:,} of {total:,} bytes")


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield base names and contents of the files in an archive; paths inside it are ignored, so none leads outside."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir():
                    with zipped.open(info) as member:
                        yield info.filename.rpartition("/")[2], member
        return
    with tarfile.open(archive) as tar:
        for entry in tar:
            content = tar.extractfile(entry) if entry.isfile() else None
            if content is not None:
                with content:
                    yield entry.name.rpartition("/")[2], content


def _explain(name: str, missing: Sequence[File], root: Path, reason: str, manual: str) -> str:
    """Return the text of the error: missing files, their addresses, why they were not fetched, and what to do."""
    lines = [f"{name} needs files that are not in {root}:"]
    lines += ["  " + ", or ".join((file.path, *file.also)) for file in missing]
    archives = dict.fromkeys(file.archive for file in missing if file.archive)
    lines += [f"  or {archive.path}, an archive that holds them" for archive in archives]
    sites = dict.fromkeys(url.removesuffix(file.name) + "<file>" for file in missing for url in file.urls)
    addresses = [*sites, *(url for archive in archives for url in archive.urls)]
    lines += ["Their addresses:", *(f"  {address}" for address in addresses)] if addresses else []
    lines += ["They could not be fetched:", *(f"  {line}" for line in reason.split("\n"))]
    lines.append(manual or "Put the files there by hand, or try again with a network.")
    lines.append("Another folder can be named with root=... or the environment variable EQUILIBRIA_DATA.")
    return "\n".join(lines)
