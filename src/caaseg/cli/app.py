"""`caaseg app`: the web app."""

import os
from typing import Annotated

from pydantic import Field

from caaseg.cli.arguments import Device, device_of
from caaseg.cli.terminal import console_for
from caaseg.errors import CaasegError


def app(
    models: list[str],
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None,
    device: Device = "auto",
) -> int:
    """Open the web app: drop an image, see its classes, click a pixel and see its attention.

    A second model is shown next to the first.

    Args:
        models: one or two models, each a run, a model directory, a shipped model such as camvid, or hf://owner/name.
        host: address to listen on; by default only this machine can open the app.
        port: port to listen on; by default the first free port from 7860.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
    """
    if len(models) > 2:
        raise CaasegError(f"{len(models)} models are given; expected one, or two to see side by side")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # gradio reads it when it is imported
    try:
        from caaseg.app import serve
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise CaasegError(
            'the app needs gradio, which is not installed; install it with: pip install "caaseg[app]"'
        ) from error
    from caaseg.models import load_model

    torch_device, console = device_of(device), console_for(None)
    loaded = [(name, load_model(name).to(torch_device)) for name in models]

    def show_address(address: str) -> None:
        console.print(f"page: {address} (Ctrl-C ends it)", soft_wrap=True, highlight=False)
        if host not in ("127.0.0.1", "localhost", "::1"):
            console.print("Note: everyone who can reach this machine can open the app.", soft_wrap=True)

    serve(loaded, host=host, port=port, on_start=show_address)
    return 0
