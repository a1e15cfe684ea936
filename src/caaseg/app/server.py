"""Web server of the app: it receives photos and returns predictions, attention and files to save."""

import asyncio
import re
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from caaseg.app import downloads
from caaseg.app.photos import MissingPhotoError, Photo, Photos, upload_directory, user_id
from caaseg.app.predictions import AppModel, Predictions
from caaseg.app.protection import KnownHosts
from caaseg.app.samples import sample_for
from caaseg.data.datasets.pairs import IMAGE_SUFFIXES
from caaseg.errors import CaasegError
from caaseg.models.image_size import ImageSize
from caaseg.models.inference import is_out_of_memory
from caaseg.predictions import release_memory

PAGE = Path(__file__).with_name("page")
MAX_MEGABYTES = 200
"""Larger files are refused. A photo of 48 megapixels has about 15 MB as JPEG, and up to 150 MB as PNG."""
MAX_SHORT_SIDE = 4096
FIRST_PORT = 7860
PORTS = 100

Answer = TypeVar("Answer")


class App:
    """The app: models, photos, and one thread in which all decoding and prediction is done, one after the other.

    One thread bounds the memory: however many photos arrive at once, one of them is decoded at a time.

    Args:
        models: one or two models.
        directory: an existing directory, for uploads.
        max_megabytes: limit of the size of a photo's file.
    """

    def __init__(self, models: Sequence[AppModel], directory: Path, *, max_megabytes: int = MAX_MEGABYTES) -> None:
        self.models = models
        self.max_megabytes = max_megabytes
        self.photos = Photos(directory)
        self.predictions = Predictions(models)
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="caaseg-app")
        self._waiting = 0  # calls that are not answered yet
        self.sample = sample_for(models)
        path = self.photos.new_path()
        self.sample.write(path)
        self.sample_photo = self.photos.add(path, self.sample.name, pinned=True)

    def asgi(self, names: Sequence[str]) -> Starlette:
        """Return the web application.

        Args:
            names: host names under which it is known.
        """
        prediction = "/api/photos/{photo}/models/{model:int}"
        routes = [
            Route("/", self.page),
            Route("/api/page", self.describe),
            Route("/api/photos", self.add_photo, methods=["POST"]),
            Route("/api/photos/{photo}", self.remove_photo, methods=["DELETE"]),
            Route("/api/photos/{photo}/view.jpg", self.view),
            Route(prediction, self.predict),
            Route(f"{prediction}/view", self.view_labels),
            Route(f"{prediction}/pixel", self.explain),
            Route(f"{prediction}/labels.png", self.save_labels),
            Route(f"{prediction}/overlay.jpg", self.save_overlay),
            Route(f"{prediction}/masks.zip", self.save_masks),
            Route(f"{prediction}/attention.png", self.save_attention),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        middleware = [Middleware(KnownHosts, names=names)]
        handlers: dict[Any, Any] = {CaasegError: _refuse, Exception: _explain_failure}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "default-src 'self' blob: data:"})

    async def describe(self, request: Request) -> Response:
        return JSONResponse(
            {
                "models": [model.description() for model in self.models],
                "photo": _about(self.sample_photo),
                "attribution": self.sample.attribution,
                "pixel": self.sample.pixel,
                "suffixes": IMAGE_SUFFIXES,
                "max_megabytes": self.max_megabytes,
            }
        )

    async def add_photo(self, request: Request) -> Response:
        """Store the photo in the body of a request; its name is the parameter `name`."""
        name = Path(request.query_params.get("name", "")).name[:200] or "photo"
        path = self.photos.new_path()
        length = 0
        try:
            with path.open("wb") as file:
                async for chunk in request.stream():
                    length += len(chunk)
                    # The rest of a larger file is read, too; otherwise the client would not get the answer.
                    if length <= self.max_megabytes << 20:
                        file.write(chunk)
        except ClientDisconnect:  # nobody reads the answer
            self.photos.discard(path)
            return Response(status_code=400)
        except OSError as error:
            self.photos.discard(path)
            advice = "free some space, or set TMPDIR to another directory"
            raise CaasegError(f"{name}: cannot be stored ({error.strerror}); {advice}") from error
        if length > self.max_megabytes << 20:
            self.photos.discard(path)
            raise CaasegError(
                f"{name}: {length / 2**20:.0f} MB; expected at most {self.max_megabytes}; save it smaller"
            )
        return JSONResponse(_about(await self._work(self.photos.add, path, name)), status_code=201)

    async def remove_photo(self, request: Request) -> Response:
        photo_id = request.path_params["photo"]
        if self.photos.remove(photo_id):
            await self._work(self.predictions.forget, photo_id)
        return Response(status_code=204)

    async def view(self, request: Request) -> Response:
        return FileResponse(self.photos.get(request.path_params["photo"]).view())

    async def predict(self, request: Request) -> Response:
        return JSONResponse(await self._work(self.predictions.summary, *self._prediction(request)))

    async def view_labels(self, request: Request) -> Response:
        content = await self._work(self.predictions.view_labels, *self._prediction(request))
        return Response(content, media_type="application/octet-stream", headers={"Content-Encoding": "gzip"})

    async def explain(self, request: Request) -> Response:
        pixel = _pixel(request)
        return JSONResponse(await self._work(self.predictions.explain, *self._prediction(request), pixel))

    async def save_labels(self, request: Request) -> Response:
        photo, model, size = self._prediction(request)

        def write(path: Path) -> None:
            labels = self.predictions.get(photo, model, size).labels.numpy()
            downloads.write_labels(labels, self.models[model], path)

        return await self._file(photo, f"{photo.stem}_labels.png", write)

    async def save_overlay(self, request: Request) -> Response:
        photo, model, size = self._prediction(request)
        opacity = _number(request, "opacity", 65, 100) / 100
        hidden = [int(k) for k in re.findall(r"\d+", request.query_params.get("hidden", ""))]

        def write(path: Path) -> None:
            labels = self.predictions.get(photo, model, size).labels.numpy()
            pixels = photo.pixels()
            downloads.write_overlay(pixels, labels, self.models[model], path, opacity=opacity, hidden=hidden)

        return await self._file(photo, f"{photo.stem}_overlay.jpg", write)

    async def save_masks(self, request: Request) -> Response:
        photo, model, size = self._prediction(request)

        def write(path: Path) -> None:
            labels = self.predictions.get(photo, model, size).labels.numpy()
            downloads.write_masks(labels, self.models[model], path)

        return await self._file(photo, f"{photo.stem}_masks.zip", write)

    async def save_attention(self, request: Request) -> Response:
        (photo, model, size), pixel = self._prediction(request), _pixel(request)

        def write(path: Path) -> None:
            found = self.predictions.get(photo, model, size)
            attention = found.at(pixel)
            if attention is None:
                raise CaasegError(found.without_maps)
            view = np.asarray(Image.open(photo.view()))
            position = ((pixel[0] + 0.5) / photo.size[0], (pixel[1] + 0.5) / photo.size[1])
            downloads.write_attention(view, attention, position, path)

        return await self._file(photo, f"{photo.stem}_attention.png", write)

    def _prediction(self, request: Request) -> tuple[Photo, int, ImageSize]:
        """Return photo, model and size of a request."""
        photo, model = self.photos.get(request.path_params["photo"]), request.path_params["model"]
        if model >= len(self.models):
            raise CaasegError(f"there is no model {model}; expected 0 to {len(self.models) - 1}")
        return photo, model, _image_size(request.query_params.get("size", "auto"))

    async def _file(self, photo: Photo, name: str, write: Callable[[Path], None]) -> Response:
        """Return a file to save, written by a function to a temporary path."""
        path = photo.directory / f"{uuid4().hex}{Path(name).suffix}"
        try:
            await self._work(write, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return FileResponse(path, filename=name, background=BackgroundTask(path.unlink, missing_ok=True))

    async def _work(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function in the worker thread. After the last of several calls, freed memory is released."""
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.worker, function, *arguments)
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self.worker.submit(release_memory)


def _about(photo: Photo) -> dict[str, Any]:
    height, width = photo.size
    view_height, view_width = photo.view_size
    sizes = {"height": height, "width": width, "view_height": view_height, "view_width": view_width}
    return {"id": photo.id, "name": photo.name, **sizes}


def _image_size(text: str) -> ImageSize:
    if text in ("auto", "native"):
        return "auto" if text == "auto" else "native"
    if re.fullmatch(r"\d{1,9}", text) and 1 <= int(text) <= MAX_SHORT_SIDE:
        return int(text)
    raise CaasegError(f"size is {text!r}; expected auto, native, or a short side of 1 to {MAX_SHORT_SIDE} pixels")


def _pixel(request: Request) -> tuple[int, int]:
    return _number(request, "row", None), _number(request, "column", None)


def _number(request: Request, name: str, default: int | None, largest: int = 1 << 20) -> int:
    text = request.query_params.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d{1,9}", text) or int(text) > largest:
        raise CaasegError(f"{name} is {text!r}; expected a number from 0 to {largest}")
    return int(text)


async def _refuse(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, MissingPhotoError) else 422
    return JSONResponse({"message": str(error)}, status_code=status)


async def _explain_failure(request: Request, error: Exception) -> Response:
    advice = "choose a smaller size" if is_out_of_memory(error) else "see the terminal in which it runs"
    reason = "not enough memory" if is_out_of_memory(error) else f"the app failed ({type(error).__name__})"
    return JSONResponse({"message": f"{reason}; {advice}"}, status_code=500)


def serve(models: Sequence[AppModel], *, host: str, port: int | None, on_start: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C, and delete uploaded photos at the end.

    Args:
        models: one or two models.
        host: address to listen on.
        port: port to listen on; None for the first free one from FIRST_PORT.
        on_start: called with the address of the page, as soon as requests are accepted.
    """
    names = ["localhost", host, socket.gethostname(), f"{socket.gethostname()}.local"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # exit as with Ctrl-C
    try:
        with (
            _listen(host, port) as listening,
            upload_directory(Path(gettempdir()) / f"caaseg-app-{user_id()}") as directory,
        ):
            app = App(models, directory)
            config = uvicorn.Config(app.asgi(names), log_level="error", timeout_graceful_shutdown=1, ws="none")
            shown = "127.0.0.1" if host == "0.0.0.0" else f"[{host}]" if ":" in host else host
            on_start(f"http://{shown}:{listening.getsockname()[1]}/")
            uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that accepts connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]
    reason = ""
    for number in ports:
        try:
            return socket.create_server((host, number), family=family, backlog=128)
        except OSError as error:
            reason = error.strerror or str(error)
    raise OSError(f"cannot listen on {host} ({reason}); use another --port or --host")
