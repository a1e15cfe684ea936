"""`caaseg app`: a page in the browser."""

import os

from caaseg.cli.terminal import console_for
from caaseg.cli.words import Device, device_of


def open_app(
    models: list[str] | None = None, *, host: str = "127.0.0.1", port: int | None = None, device: Device = "auto"
) -> int:
    """Open a page for the browser: drop an image, see its classes, click a pixel and see what it looks at.

    A second model is shown beside the first.

    Args:
        models: one model or two, each a run's folder, the folder of a saved model, or a hub id.
        host: address to listen on. Unless given, the page can be opened on this machine alone.
        port: where to listen; the first free one from 7860 on unless given.
        device: where to run; auto takes a GPU if there is one.
    """
    if not models:
        raise ValueError("no model is given; give a run's folder, a saved model's folder or a hub id: caaseg app MODEL")
    if len(models) > 2:
        raise ValueError(f"{len(models)} models are given; expected one, or two to see side by side")
    if port is not None and not 1 <= port <= 65_535:
        raise ValueError(f"--port is {port}; expected a number from 1 to 65535")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when it is imported; nothing is told to anyone
    try:
        from caaseg.app import serve
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        raise ValueError(
            'the page needs gradio, which is not installed; install it with: pip install "caaseg[app]"'
        ) from error
    from caaseg.models import load_model

    place, console = device_of(device), console_for(None)
    loaded = [(name, load_model(name).to(place)) for name in models]

    def show_address(address: str) -> None:
        console.print(f"page: {address} (Ctrl-C ends it)", soft_wrap=True, highlight=False)
        if host not in ("127.0.0.1", "localhost", "::1"):
            console.print("Note: whoever can reach this machine can open the page.", soft_wrap=True)

    serve(loaded, host=host, port=port, on_start=show_address)
    return 0
