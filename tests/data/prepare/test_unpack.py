"""Archives, valid and malicious: nothing is written outside, no directory is incomplete."""

import errno
import gzip
import io
import random
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from caaseg.data.prepare.unpack import unpack
from caaseg.data.sample import BadFileError
from tests.data import trees

GOOD = {"top/images/a.jpg": b"a" * 5000, "top/images/deep/b.jpg": b"b", "top/list.txt": b"a\nb\n", "other/x": b"x"}
WANTED = ("top/images", "top/list.txt")


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return path


def tarred(path: Path, members: dict[str, bytes], *extra: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for entry in extra:
            archive.addfile(entry)
    return path


def targets(root: Path) -> dict[str, Path]:
    return {inside: root / "new" / inside for inside in WANTED}


def everything_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def made(root: Path, name: str, members: dict[str, bytes]) -> Path:
    return zipped(root / name, members) if name.endswith(".zip") else tarred(root / name, members)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_only_wanted_directories_are_unpacked(tmp_path: Path, name: str) -> None:
    steps: list[tuple[str, int, int | None]] = []
    archive = made(tmp_path, name, GOOD)
    unpack(archive, targets(tmp_path), lambda *step: steps.append(step))
    assert len(steps) == 3
    assert all(step == f"unpacking {name}" and total == archive.stat().st_size >= done for step, done, total in steps)
    assert (tmp_path / "new" / "top" / "images" / "a.jpg").read_bytes() == b"a" * 5000
    assert (tmp_path / "new" / "top" / "images" / "deep" / "b.jpg").read_bytes() == b"b"
    assert (tmp_path / "new" / "top" / "list.txt").read_bytes() == b"a\nb\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "new"]
    assert not (tmp_path / "new" / "other").exists()


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize("evil", ["../evil", "top/images/../../../evil", "/evil", "..\\evil", "C:\\evil", "C:evil"])
def test_an_archive_with_a_path_outside_is_refused(tmp_path: Path, name: str, evil: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    made(root, name, {**GOOD, evil: b"evil"})
    with pytest.raises(BadFileError, match=rf"{name}: the member .* would be written outside the target; nothing was"):
        unpack(root / name, targets(root), trees.no_progress)
    assert everything_in(tmp_path) == ["root", f"root/{name}"]


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        (tarfile.SYMTYPE, "/etc/passwd"),
        (tarfile.SYMTYPE, "../../x"),
        (tarfile.SYMTYPE, "a.jpg"),
        (tarfile.LNKTYPE, "top/images/a.jpg"),
        (tarfile.FIFOTYPE, ""),
        (tarfile.CHRTYPE, ""),
    ],
)
def test_a_tar_with_links_or_devices_is_refused(tmp_path: Path, kind: bytes, to: str) -> None:
    entry = tarfile.TarInfo("top/images/link")
    entry.type, entry.linkname = kind, to
    tarred(tmp_path / "a.tar", GOOD, entry)
    with pytest.raises(BadFileError, match=r"a\.tar: the member 'top/images/link' is a link or a device; nothing was"):
        unpack(tmp_path / "a.tar", targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path) == ["a.tar"]


def test_a_zip_with_a_link_is_refused(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip", GOOD)
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as archive:
        entry = zipfile.ZipInfo("top/images/link")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc")
    with pytest.raises(BadFileError, match=r"a\.zip: the member 'top/images/link' is a link or a device; nothing was"):
        unpack(tmp_path / "a.zip", targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path) == ["a.zip"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
@pytest.mark.parametrize("share", [0, 0.3, 0.6])
def test_a_damaged_archive_leaves_nothing(tmp_path: Path, name: str, share: float) -> None:
    path = made(tmp_path, name, GOOD)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(BadFileError, match=rf"{name}: (damaged|does not contain top/)"):
        unpack(path, targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path) == [name]


def test_a_changed_byte_in_a_zip_is_found(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:  # not compressed, so that only the checksum detects it
        for name, content in GOOD.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    changed = bytearray((tmp_path / "a.zip").read_bytes())
    changed[changed.index(b"aaaa") + 100] = 0
    (tmp_path / "a.zip").write_bytes(changed)
    with pytest.raises(BadFileError, match=r"a\.zip: damaged \(BadZipFile: Bad CRC-32 .*remove it and run"):
        unpack(tmp_path / "a.zip", targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path) == ["a.zip"]


def test_an_archive_without_the_wanted_directory_is_reported(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip", {"else/x": b"x"})
    with pytest.raises(BadFileError, match=r"a\.zip: does not contain top/images, which is needed"):
        unpack(tmp_path / "a.zip", targets(tmp_path), trees.no_progress)


def test_leftovers_of_an_interrupted_run_are_deleted(tmp_path: Path) -> None:
    left = tmp_path / ".a.zip.part" / "top" / "images"
    left.mkdir(parents=True)
    (left / "half.jpg").write_bytes(b"half")
    unpack(zipped(tmp_path / "a.zip", GOOD), targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path / "new" / "top" / "images") == ["a.jpg", "deep", "deep/b.jpg"]
    assert not (tmp_path / ".a.zip.part").exists()


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
@pytest.mark.parametrize("member", ["top/images/zeros", "unwanted/zeros"])
def test_an_archive_that_grows_too_much_is_refused(tmp_path: Path, name: str, member: str) -> None:
    archive = made(tmp_path, name, {**GOOD, member: bytes(4_000_000)})
    size = archive.stat().st_size
    message = rf"{name}: {size:,} bytes that unpack to 4,00.* or more; expected at most 1,000,000; nothing was unpacked"
    with pytest.raises(BadFileError, match=message):
        unpack(archive, targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path) == [name]


def test_an_archive_may_grow_20_times(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(100_000)
    archive = zipped(tmp_path / "a.zip", {**GOOD, "noise": noise, "top/images/zeros": bytes(1_800_000)})
    unpack(archive, targets(tmp_path), trees.no_progress)
    archive = zipped(tmp_path / "b.zip", {**GOOD, "noise": noise, "top/images/zeros": bytes(2_200_000)})
    with pytest.raises(BadFileError, match=r"b\.zip: 10.,... bytes that unpack to 2,3"):
        unpack(archive, {"top": tmp_path / "b"}, trees.no_progress)


def test_an_archive_with_too_many_members_is_refused(tmp_path: Path) -> None:
    archive = tarred(tmp_path / "a.tar.gz", {**GOOD, **{f"top/images/{k}": b"" for k in range(2000)}})
    with pytest.raises(BadFileError, match=r"a\.tar\.gz: .* bytes that unpack to 1,000,.* or more; expected at most"):
        unpack(archive, targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path) == ["a.tar.gz"]


def test_a_changed_byte_in_a_tar_gz_is_found(tmp_path: Path) -> None:
    tarred(tmp_path / "a.tar", GOOD)
    content = bytearray((tmp_path / "a.tar").read_bytes())
    good = gzip.compress(content)
    content[content.index(b"aaaa") + 100] = 0
    changed = gzip.compress(content)
    (tmp_path / "a.tar.gz").write_bytes(changed[:-8] + good[-8:])  # the checksum of the original content
    with pytest.raises(BadFileError, match=r"a\.tar\.gz: damaged \(BadGzipFile: CRC check failed .*remove it and run"):
        unpack(tmp_path / "a.tar.gz", targets(tmp_path), trees.no_progress)
    assert everything_in(tmp_path) == ["a.tar", "a.tar.gz"]


def test_endless_padding_after_a_tar_is_refused(tmp_path: Path) -> None:
    tarred(tmp_path / "a.tar", GOOD)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes() + bytes(4_000_000)))
    with pytest.raises(BadFileError, match=r"a\.tar\.gz: .* bytes that unpack to 1,.* or more; expected at most"):
        unpack(tmp_path / "a.tar.gz", targets(tmp_path), trees.no_progress)


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_an_archive_larger_than_the_free_disk_space_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int

    archive = made(tmp_path, name, GOOD)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(5004))
    with pytest.raises(OSError, match="5,005 bytes or more to unpack, 5,004 free") as caught:
        unpack(archive, targets(tmp_path), trees.no_progress)
    assert caught.value.errno == errno.ENOSPC
    assert everything_in(tmp_path) == [name]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(5005))  # members that are not wanted take no space
    unpack(archive, targets(tmp_path), trees.no_progress)
