"""Archives, good and bad: nothing is written outside, nothing appears by halves."""

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from caaseg.data.prepare.unpack import unpack
from caaseg.data.sample import BadFileError
from tests.data.datasets.test_coco_stuff import quiet

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


def places(root: Path) -> dict[str, Path]:
    return {inside: root / "new" / inside for inside in WANTED}


def everything_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def made(root: Path, name: str, members: dict[str, bytes]) -> Path:
    return zipped(root / name, members) if name.endswith(".zip") else tarred(root / name, members)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_wanted_folders_come_to_their_places_and_nothing_else(tmp_path: Path, name: str) -> None:
    steps: list[tuple[str, int, int | None]] = []
    archive = made(tmp_path, name, GOOD)
    unpack(archive, places(tmp_path), lambda *step: steps.append(step))
    assert len(steps) == 3
    assert all(step == f"unpacking {name}" and total == archive.stat().st_size >= done for step, done, total in steps)
    assert (tmp_path / "new" / "top" / "images" / "a.jpg").read_bytes() == b"a" * 5000
    assert (tmp_path / "new" / "top" / "images" / "deep" / "b.jpg").read_bytes() == b"b"
    assert (tmp_path / "new" / "top" / "list.txt").read_bytes() == b"a\nb\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "new"]
    assert not (tmp_path / "new" / "other").exists()


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
@pytest.mark.parametrize("evil", ["../evil", "top/images/../../../evil", "/evil", "..\\evil", "C:\\evil", "C:evil"])
def test_a_name_that_leads_outside_condemns_the_archive(tmp_path: Path, name: str, evil: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    made(root, name, {**GOOD, evil: b"evil"})
    with pytest.raises(BadFileError, match=rf"{name}: a member called .* would be written outside; nothing was"):
        unpack(root / name, places(root), quiet)
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
def test_links_and_devices_in_a_tar_condemn_it(tmp_path: Path, kind: bytes, to: str) -> None:
    entry = tarfile.TarInfo("top/images/link")
    entry.type, entry.linkname = kind, to
    tarred(tmp_path / "a.tar", GOOD, entry)
    with pytest.raises(BadFileError, match=r"a\.tar: the member 'top/images/link' is a link or a device; nothing was"):
        unpack(tmp_path / "a.tar", places(tmp_path), quiet)
    assert everything_in(tmp_path) == ["a.tar"]


def test_a_link_in_a_zip_condemns_it(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip", GOOD)
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as archive:
        entry = zipfile.ZipInfo("top/images/link")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc")
    with pytest.raises(BadFileError, match=r"a\.zip: the member 'top/images/link' is a link or a device; nothing was"):
        unpack(tmp_path / "a.zip", places(tmp_path), quiet)
    assert everything_in(tmp_path) == ["a.zip"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
@pytest.mark.parametrize("share", [0, 0.3, 0.6])
def test_a_damaged_archive_leaves_nothing(tmp_path: Path, name: str, share: float) -> None:
    path = made(tmp_path, name, GOOD)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(BadFileError, match=rf"{name}: (damaged|no top/)"):
        unpack(path, places(tmp_path), quiet)
    assert everything_in(tmp_path) == [name]


def test_a_changed_byte_in_a_zip_is_found(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:  # stored, so that only the checksum can tell
        for name, content in GOOD.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    changed = bytearray((tmp_path / "a.zip").read_bytes())
    changed[changed.index(b"aaaa") + 100] = 0
    (tmp_path / "a.zip").write_bytes(changed)
    with pytest.raises(BadFileError, match=r"a\.zip: damaged \(BadZipFile: Bad CRC-32 .*remove it and run"):
        unpack(tmp_path / "a.zip", places(tmp_path), quiet)
    assert everything_in(tmp_path) == ["a.zip"]


def test_an_archive_without_what_is_wanted_is_said(tmp_path: Path) -> None:
    zipped(tmp_path / "a.zip", {"else/x": b"x"})
    with pytest.raises(BadFileError, match=r"a\.zip: no top/images in it"):
        unpack(tmp_path / "a.zip", places(tmp_path), quiet)


def test_what_an_interrupted_run_left_is_not_taken_over(tmp_path: Path) -> None:
    left = tmp_path / ".a.zip.part" / "top" / "images"
    left.mkdir(parents=True)
    (left / "half.jpg").write_bytes(b"half")
    unpack(zipped(tmp_path / "a.zip", GOOD), places(tmp_path), quiet)
    assert everything_in(tmp_path / "new" / "top" / "images") == ["a.jpg", "deep", "deep/b.jpg"]
    assert not (tmp_path / ".a.zip.part").exists()
