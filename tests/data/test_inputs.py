"""Files, directories and patterns are expanded to images with unique names."""

from pathlib import Path

import pytest

from caaseg.data.inputs import find_images


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def named(root: Path, *inputs: str) -> dict[str, str]:
    found = find_images([str(root / text) for text in inputs])
    assert found.errors == []
    return {str(image.path.relative_to(root)): image.name.as_posix() for image in found.images}


def test_a_directory_gives_all_images_below_it_in_order(tmp_path: Path) -> None:
    tree(tmp_path, "p/b.png", "p/a/c.JPG", "p/a/d/e.tiff", "p/notes.txt", "p/.hidden.png", "p/.git/x.png")
    assert named(tmp_path, "p") == {"p/b.png": "b", "p/a/c.JPG": "a/c", "p/a/d/e.tiff": "a/d/e"}
    assert find_images([str(tmp_path / "p")]).skipped == 1


def test_result_names_include_the_directories_that_distinguish_files(tmp_path: Path) -> None:
    tree(tmp_path, "a/x.png", "b/x.png", "b/c/y.png")
    assert named(tmp_path, "a/x.png", "b/x.png") == {"a/x.png": "a/x", "b/x.png": "b/x"}
    assert named(tmp_path, "a", "b") == {"a/x.png": "a/x", "b/x.png": "b/x", "b/c/y.png": "b/c/y"}
    assert named(tmp_path, "a/x.png") == {"a/x.png": "x"}
    assert named(tmp_path, "b/c") == {"b/c/y.png": "y"}  # relative to the input directory


def test_result_names_include_the_suffix_if_they_would_be_equal_without_it(tmp_path: Path) -> None:
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


def test_an_image_named_twice_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "p/a.png", "p/b.png")
    monkeypatch.chdir(tmp_path)
    found = find_images(["p/b.png", "p", "p/*.png", "./p/../p/a.png", str(tmp_path / "p/a.png")])
    assert [str(image.path) for image in found.images] == ["p/b.png", "p/a.png"]  # as first named
    assert find_images(["p/"]).images[0].path == Path("p/a.png")


def test_patterns_match_visible_files(tmp_path: Path) -> None:
    tree(tmp_path, "p/a.png", "p/b.jpg", "p/q/c.jpg", "p/q/.d.jpg", "p/[1].jpg")
    assert named(tmp_path, "p/*.jpg") == {"p/[1].jpg": "[1]", "p/b.jpg": "b"}
    assert named(tmp_path, "p/**/*.jpg") == {"p/[1].jpg": "[1]", "p/b.jpg": "b", "p/q/c.jpg": "q/c"}
    assert named(tmp_path, "*/q/*") == {"p/q/c.jpg": "p/q/c"}
    assert named(tmp_path, "p/[1].jpg") == {"p/[1].jpg": "[1]"}  # an existing file is not a pattern


def test_inputs_without_images_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "p/a.png", "empty/notes.txt")
    monkeypatch.chdir(tmp_path)
    found = find_images(["p", "empty", "no*.jpg", "gone.png"])
    assert [str(image.path) for image in found.images] == ["p/a.png", "gone.png"]  # reading it reports the error
    assert found.errors[0].startswith("empty: no images in this directory; expected files that end in .jpg, ")
    assert found.errors[1].startswith("no*.jpg: no file matches; expected files that end in .jpg, ")
    assert len(found.errors) == 2


def test_output_directories_are_excluded(tmp_path: Path) -> None:
    tree(tmp_path, "a.png", "labels/a.png", "deep/labels/b.png")
    found = find_images([str(tmp_path)], exclude=[tmp_path / "labels"])
    assert [image.name.as_posix() for image in found.images] == ["a", "deep/labels/b"]


def test_a_cyclic_link_is_not_followed(tmp_path: Path) -> None:
    tree(tmp_path, "p/a.png", "elsewhere/b.png")
    (tmp_path / "p/again").symlink_to(tmp_path / "p")
    (tmp_path / "p/link.png").symlink_to(tmp_path / "elsewhere/b.png")
    assert named(tmp_path, "p") == {"p/a.png": "a", "p/link.png": "link"}
