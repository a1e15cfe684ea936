"""Photos of the app on disk. Each has its own directory with all files made from it, until it is removed."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from PIL import Image
from torch import Tensor

from caaseg.data.decode import read_image
from caaseg.data.sample import BadFileError
from caaseg.errors import CaasegError
from caaseg.files import lock_name

VIEW_SIDE = 1600
"""Maximum length of the longer side of a photo on the page. Files to save have the size of the photo."""
MAX_PHOTOS = 200
MAX_BYTES = 4 << 30
"""Above either limit, the least recently used photo is deleted."""


class MissingPhotoError(CaasegError):
    """A photo is not stored, or no longer stored."""


@dataclass(frozen=True)
class Photo:
    """A stored photo."""

    id: str
    name: str  # file name on the user's machine
    path: Path  # the file as it was uploaded
    size: tuple[int, int]  # height and width
    view_size: tuple[int, int]  # height and width of its view
    bytes: int  # size of the file
    pinned: bool = False  # stays until the app ends

    @property
    def directory(self) -> Path:
        """Directory of all files made from the photo."""
        return self.path.parent

    @property
    def stem(self) -> str:
        """Name of the file without its suffix, for the names of files to save."""
        return Path(self.name).stem or "photo"

    def view(self) -> Path:
        """Return the path of the photo as a JPEG file, reduced for the page."""
        return self.directory / "view.jpg"

    def pixels(self) -> Tensor:
        """Decode the photo, (3, H, W) uint8."""
        return read_named(self.path, self.name)


class Photos:
    """The photos of all sessions. Safe to use from several threads.

    Args:
        directory: an existing directory, for the files.
        max_photos: number of photos above which the least recently used one is deleted.
        max_bytes: total size of the uploaded files above which the least recently used photo is deleted.
    """

    def __init__(self, directory: Path, *, max_photos: int = MAX_PHOTOS, max_bytes: int = MAX_BYTES) -> None:
        self._directory = directory
        self._max_photos, self._max_bytes = max_photos, max_bytes
        self._photos: dict[str, Photo] = {}  # the least recently used one first
        self._lock = threading.Lock()

    def new_path(self) -> Path:
        """Return a path for a photo that is about to be stored, in a new directory."""
        directory = self._directory / uuid4().hex
        directory.mkdir()
        return directory / "photo"

    def add(self, path: Path, name: str, *, pinned: bool = False) -> Photo:
        """Decode the file at a path of `new_path`, and store it; delete it if it is not a photo.

        Args:
            path: the file.
            name: file name on the user's machine, for messages and for the names of files to save.
            pinned: store it until the app ends.
        """
        try:
            pixels = read_named(path, name)
            view = Image.fromarray(pixels.permute(1, 2, 0).numpy())
            view.thumbnail((VIEW_SIDE, VIEW_SIDE), Image.Resampling.LANCZOS)
            view_size = (view.height, view.width)
            size, length = (pixels.shape[1], pixels.shape[2]), path.stat().st_size
            photo = Photo(path.parent.name, name, path, size, view_size, length, pinned)
            view.save(photo.view(), quality=92)
        except BaseException:
            self.discard(path)
            raise
        with self._lock:
            self._photos[photo.id] = photo
        self._delete_oldest(photo)
        return photo

    def get(self, photo_id: str) -> Photo:
        """Return a stored photo."""
        with self._lock:
            if photo_id not in self._photos:
                raise MissingPhotoError("The photo is no longer stored; add it again.")
            photo = self._photos.pop(photo_id)
            self._photos[photo_id] = photo
            return photo

    def remove(self, photo_id: str) -> bool:
        """Delete a photo and all files made from it. Return False if it is not stored, or pinned."""
        with self._lock:
            if photo_id not in self._photos or self._photos[photo_id].pinned:
                return False
            photo = self._photos.pop(photo_id)
        self.discard(photo.path)
        return True

    def discard(self, path: Path) -> None:
        """Delete a path of `new_path` with its directory."""
        shutil.rmtree(path.parent, ignore_errors=True)

    def _delete_oldest(self, newest: Photo) -> None:
        with self._lock:
            photos = list(self._photos.values())
        number, total = len(photos), sum(photo.bytes for photo in photos)
        for photo in photos:
            if number <= self._max_photos and total <= self._max_bytes:
                break
            if photo is not newest and self.remove(photo.id):
                number, total = number - 1, total - photo.bytes


def read_named(path: Path, name: str) -> Tensor:
    """Decode a photo, (3, H, W) uint8; error messages contain its own name, not its path in the app."""
    try:
        return read_image(path)
    except BadFileError as error:
        message = str(error).removesuffix(", or raise the limit")  # the limit is an option of commands, not of the app
        raise BadFileError(message.replace(str(path), name)) from error


@contextmanager
def upload_directory(parent: Path) -> Iterator[Path]:
    """Yield a new directory for uploads, deleted at the end. Directories left by killed apps are deleted, too.

    Args:
        parent: directory of the uploads of all apps of this user; created if it does not exist.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if parent.lstat().st_uid != user_id():  # both are 0 on Windows
        raise CaasegError(
            f"{parent}: belongs to another user, who could change uploads; set TMPDIR to another directory"
        )
    for leftover in [path for path in parent.iterdir() if path.is_dir()]:
        with lock_name(parent, leftover.name, wait=False) as is_free:
            if is_free:
                shutil.rmtree(leftover, ignore_errors=True)
    directory = parent / uuid4().hex
    with lock_name(parent, directory.name, wait=True):  # before mkdir, so that it always has a lock
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def user_id() -> int:
    """Return the id of the user; 0 on Windows, where each user has their own temporary directory."""
    return os.getuid() if hasattr(os, "getuid") else 0
