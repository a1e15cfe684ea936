"""The output directory of `caaseg predict`: its files, their origin, and the protection of other files in it.

    OUT/predict.json             model and options, the same for all results
    OUT/metadata/NAME.json       path and SHA-256 of the image and of the model, SHA-256 of each result
    OUT/labels/NAME.png          class ids, with the palette
    OUT/overlays/NAME.jpg        the image blended with the colors of its labels; a video has only NAME.mp4
    OUT/probabilities/NAME.npy   if requested: float16 (H, W, K)

Metadata lists a result before it is written. A file that no metadata lists therefore belongs to the user: it causes an
error, and is never replaced or deleted. A result whose SHA-256 differs from its metadata is unfinished or damaged.
"""

import json
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import caaseg
from caaseg.data.sample import Color
from caaseg.errors import CaasegError
from caaseg.files import atomic_write, hash_files, lock_name, read_json, remove_stale_temporaries

RECORD = "predict.json"
"""Name of the file, and of the lock that is held while it changes."""
OUTPUT_DIRECTORIES = ("metadata", "labels", "overlays", "probabilities")
RECORDED = ("made_by", "classes", "palette")
ADVICE = "use another --out"


class OutputPaths(NamedTuple):
    """Files of an image, relative to the output directory."""

    metadata: Path
    labels: Path
    overlays: tuple[Path, Path]  # JPEG, or PNG if a side is too long for JPEG
    probabilities: Path
    video: Path

    @property
    def results(self) -> tuple[Path, ...]:
        """All files except the metadata."""
        return (self.labels, *self.overlays, self.probabilities, self.video)


def output_paths(name: Path) -> OutputPaths:
    """Return the files of an image with this name."""

    def path(directory: str, suffix: str) -> Path:
        parent = directory / name
        return parent.with_name(parent.name + suffix)  # not with_suffix: names may contain dots

    metadata, labels, overlays, probabilities = OUTPUT_DIRECTORIES
    return OutputPaths(
        path(metadata, ".json"),
        path(labels, ".png"),
        (path(overlays, ".jpg"), path(overlays, ".png")),
        path(probabilities, ".npy"),
        path(overlays, ".mp4"),
    )


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Origin and content of the results of an image."""

    image: str
    """Path as given, or as found in a given directory."""
    image_sha256: str
    model: str
    """Path or hub id, as given."""
    model_sha256: str
    results: dict[str, str | None]
    """SHA-256 of each result by its path in the output directory; None while it is being written."""
    grids_compared: bool = False
    grid_disagreement: float | None = None
    """Share of pixels whose class changes with a shifted grid of windows; None if not compared, or not tiled."""


@dataclass(frozen=True, kw_only=True)
class PredictionDirectory:
    """An output directory for one model and one set of options. Several processes with both may share it."""

    path: Path
    made_by: dict[str, Any]
    """SHA-256 of the model, and options, as in JSON."""
    classes: tuple[str, ...] | None = None
    palette: tuple[Color, ...] = ()

    def open(self, names: Iterable[Path]) -> None:
        """Create the directory and predict.json, or raise CaasegError if the results cannot be written to it.

        It must not have results of another model or other options, nor files of the user at the paths of the results.
        """
        record = self.path / RECORD
        self.path.mkdir(parents=True, exist_ok=True)
        with lock_name(self.path, RECORD, wait=True):
            self._check_not_linked(Path(RECORD))
            used = [name for name in OUTPUT_DIRECTORIES if _has_visible_files(self.path / name)]
            exists = record.exists()
            if used and not exists:
                raise CaasegError(
                    f"{self.path / used[0]}: has files, and caaseg predict did not write them, because there is no "
                    f"{record}; {ADVICE}"
                )
            different = self._differences() if exists else []
            if used and different:
                self._refuse(different)
            for name in names:
                self.check_own(name)
            if different or not exists:
                content = {"caaseg": caaseg.__version__} | {key: getattr(self, key) for key in RECORDED}
                remove_stale_temporaries(record)
                with atomic_write(record) as file:
                    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def read(self, name: Path) -> Metadata | None:
        """Return the metadata of an image, or None if there is none."""
        path = self.path / output_paths(name).metadata
        if not stat.S_ISREG(_mode(path)):
            return None
        advice = f"expected the metadata that caaseg predict writes; {ADVICE}"
        content = read_json(path, advice)
        try:
            metadata = Metadata(**content)
        except TypeError as error:
            raise CaasegError(f"{path}: found other content; {advice}") from error
        if not isinstance(metadata.results, dict) or not isinstance(metadata.grid_disagreement, float | None):
            raise CaasegError(f"{path}: found other values; {advice}")
        return metadata

    def begin(self, name: Path, metadata: Metadata) -> None:
        """Write metadata that lists new results as None, and delete the old ones. The caller holds the image's lock."""
        paths, before = output_paths(name), self.read(name)
        with lock_name(self.path, RECORD, wait=True):
            if different := self._differences():  # changed by another process before the first result
                self._refuse(different)
            self.check_own(name)
            for path in paths.results:
                remove_stale_temporaries(self.path / path)
                if before is not None and str(path) in before.results and metadata.results.get(str(path)) is None:
                    (self.path / path).unlink(missing_ok=True)
            self._write(name, metadata)

    def finish(self, name: Path, metadata: Metadata) -> None:
        """Write metadata with the SHA-256 of the new results. The caller holds the image's lock."""
        results: dict[str, str | None] = {
            path: found or hash_files(self.path / path) for path, found in metadata.results.items()
        }
        self._write(name, replace(metadata, results=results))

    def is_intact(self, path: Path, metadata: Metadata) -> bool:
        """Return whether a result exists and is unchanged."""
        file, expected = self.path / path, metadata.results.get(str(path))
        return expected is not None and stat.S_ISREG(_mode(file)) and hash_files(file) == expected

    def check_own(self, name: Path) -> None:
        """Raise CaasegError if a file of the user is where a file of this image would be written."""
        paths = output_paths(name)
        for path in (paths.metadata, *paths.results):
            self._check_not_linked(path)
        # Look for results first: other processes write the metadata before the results.
        existing = [path for path in paths.results if _mode(self.path / path)]
        metadata = self.read(name)
        for path in existing:
            if metadata is None or str(path) not in metadata.results:
                raise CaasegError(
                    f"{self.path / path}: exists, and caaseg predict did not write it; {ADVICE}, or move that file"
                )

    def _check_not_linked(self, path: Path) -> None:
        for part in (path, *path.parents[:-1]):
            if stat.S_ISLNK(_mode(self.path / part)):
                raise CaasegError(
                    f"{self.path / part}: a symbolic link, and caaseg predict writes below --out only; {ADVICE}"
                )

    def _differences(self) -> list[str]:
        """Return each difference from the model and the options in predict.json."""
        path = self.path / RECORD
        advice = f"expected the file that caaseg predict writes; {ADVICE}"
        content = read_json(path, advice)
        try:
            found = content["made_by"]
            different = {key: found[key] for key, value in self.made_by.items() if found[key] != value}
        except (KeyError, TypeError) as error:
            raise CaasegError(f"{path}: not a record of predictions; {advice}") from error
        if "output_stride" in different:  # the model's SHA-256 includes it
            different.pop("model_sha256", None)
        return [f"{key} {json.dumps(then)}, not {json.dumps(self.made_by[key])}" for key, then in different.items()]

    def _refuse(self, different: list[str]) -> NoReturn:
        raise CaasegError(f"{self.path}: has predictions with {' and with '.join(different)}; {ADVICE}")

    def _write(self, name: Path, metadata: Metadata) -> None:
        path = self.path / output_paths(name).metadata
        remove_stale_temporaries(path)
        with atomic_write(path) as file:
            file.write_text(json.dumps(asdict(metadata), indent=1) + "\n", encoding="utf-8")


def _mode(path: Path) -> int:
    """Return the mode of a file or link; 0 if there is none, as with a name that is too long."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _has_visible_files(directory: Path) -> bool:
    return directory.is_dir() and any(not file.name.startswith(".") for file in directory.iterdir())
