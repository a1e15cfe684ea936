"""Files, folders and patterns become pictures with names of their own."""

from pathlib import Path

import pytest

from caaseg.data.inputs import find_pictures


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def named(root: Path, *words: str) -> dict[str, str]:
    found = find_pictures([str(root / word) for word in words])
    assert found.faults == []
    return {str(picture.path.relative_to(root)): picture.name.as_posix() for picture in found.pictures}


def test_a_folder_gives_all_images_below_it_in_order(tmp_path: Path) -> None:
    tree(tmp_path, "p/b.png", "p/a/c.JPG", "p/a/d/e.tiff", "p/notes.txt", "p/.hidden.png", "p/.git/x.png")
    assert named(tmp_path, "p") == {"p/b.png": "b", "p/a/c.JPG": "a/c", "p/a/d/e.tiff": "a/d/e"}
    assert find_pictures([str(tmp_path / "p")]).left_out == 1


def test_files_of_one_name_keep_their_folders(tmp_path: Path) -> None:
    tree(tmp_path, "a/x.png", "b/x.png", "b/c/y.png")
    assert named(tmp_path, "a/x.png", "b/x.png") == {"a/x.png": "a/x", "b/x.png": "b/x"}
    assert named(tmp_path, "a", "b") == {"a/x.png": "a/x", "b/x.png": "b/x", "b/c/y.png": "b/c/y"}
    assert named(tmp_path, "a/x.png") == {"a/x.png": "x"}
    assert named(tmp_path, "b/c") == {"b/c/y.png": "y"}  # below the folder that was given


def test_an_ending_stays_where_the_rest_is_the_same(tmp_path: Path) -> None:
    names = ["x.jpg", "x.png", "x.jpg.bmp", "y.z.png", "..png", "w"]
    tree(tmp_path, *names)
    found = named(tmp_path, *names)
    assert found == {
        "x.jpg": "x.jpg",
        "x.png": "x.png",
        "x.jpg.bmp": "x.jpg.bmp",
        "y.z.png": "y.z",
        "..png": "..png",
        "w": "w",
    }
    assert len(set(found.values())) == len(names)


def test_what_is_asked_for_twice_is_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "p/a.png", "p/b.png")
    monkeypatch.chdir(tmp_path)
    found = find_pictures(["p/b.png", "p", "p/*.png", "./p/../p/a.png", str(tmp_path / "p/a.png")])
    assert [str(picture.path) for picture in found.pictures] == ["p/b.png", "p/a.png"]  # as first given
    assert find_pictures(["p/"]).pictures[0].path == Path("p/a.png")


def test_patterns(tmp_path: Path) -> None:
    tree(tmp_path, "p/a.png", "p/b.jpg", "p/q/c.jpg", "p/q/.d.jpg", "p/[1].jpg")
    assert named(tmp_path, "p/*.jpg") == {"p/[1].jpg": "[1]", "p/b.jpg": "b"}
    assert named(tmp_path, "p/**/*.jpg") == {"p/[1].jpg": "[1]", "p/b.jpg": "b", "p/q/c.jpg": "q/c"}
    assert named(tmp_path, "*/q/*") == {"p/q/c.jpg": "p/q/c"}
    assert named(tmp_path, "p/[1].jpg") == {"p/[1].jpg": "[1]"}  # a file of that very name


def test_what_gives_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "p/a.png", "empty/notes.txt")
    monkeypatch.chdir(tmp_path)
    found = find_pictures(["p", "empty", "no*.jpg", "gone.png"])
    assert [str(picture.path) for picture in found.pictures] == ["p/a.png", "gone.png"]  # its reading will say
    assert found.faults[0].startswith("empty: no images in this folder; expected files that end in .jpg, ")
    assert found.faults[1].startswith("no*.jpg: no file matches; expected files that end in .jpg, ")
    assert len(found.faults) == 2


def test_results_are_not_taken_for_inputs(tmp_path: Path) -> None:
    tree(tmp_path, "a.png", "labels/a.png", "deep/labels/b.png")
    found = find_pictures([str(tmp_path)], apart_from=[tmp_path / "labels"])
    assert [picture.name.as_posix() for picture in found.pictures] == ["a", "deep/labels/b"]


def test_a_link_that_leads_back_is_not_followed(tmp_path: Path) -> None:
    tree(tmp_path, "p/a.png", "elsewhere/b.png")
    (tmp_path / "p/again").symlink_to(tmp_path / "p")
    (tmp_path / "p/link.png").symlink_to(tmp_path / "elsewhere/b.png")
    assert named(tmp_path, "p") == {"p/a.png": "a", "p/link.png": "link"}
