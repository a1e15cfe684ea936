"""`caaseg app`: the web app."""

import os
import sys
import webbrowser
from typing import Annotated

from pydantic import Field

from caaseg.cli.arguments import Device, device_of
from caaseg.cli.terminal import console_for
from caaseg.errors import CaasegError


def app(
    models: list[str] = ["camvid"],  # noqa: B006  # never changed
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None,
    no_browser: bool = False,
    device: Device = "auto",
) -> int:
    """Open the web app: add photos, see and save their classes, and select a pixel to see its attention.

    A second model is compared with the first.

    Args:
        models: one or two models, each a run, a model directory, a shipped model such as camvid, an .onnx file, or
            hf://owner/name.
        host: address to listen on; by default only this machine can open the app.
        port: port to listen on; by default the first free port from 7860.
        no_browser: do not open the page in a browser.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
    """
    if len(models) > 2:
        raise CaasegError(f"{len(models)} models are given; expected one, or two to compare")
    try:
        from caaseg.app.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise CaasegError(
            f'the app needs {error.name}, which is not installed; install it with: pip install "caaseg[app]"'
        ) from error
    from caaseg.app.predictions import AppModel
    from caaseg.models.loading import load_model

    torch_device, console = device_of(device), console_for(None)
    loaded = [AppModel(name, load_model(name, device=torch_device)) for name in models]

    def show_address(address: str) -> None:
        console.print(f"page: {address} (press Ctrl-C to stop the app)", soft_wrap=True, highlight=False)
        is_local = host in ("127.0.0.1", "localhost", "::1")
        if not is_local:
            console.print("Note: everyone who can reach this machine can open the app.", soft_wrap=True)
        if is_local and not no_browser and _has_display():
            webbrowser.open(address)

    serve(loaded, host=host, port=port, on_start=show_address)
    return 0


def _has_display() -> bool:
    """Return whether a browser window can be opened. Without a display, a text browser could take the terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
