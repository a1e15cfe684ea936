"""Serves the app, sends it requests, and prints the answers and the host names that were looked up, as JSON.

python -m tests.app_requests
"""

import json
import os
import socket
import urllib.error
import urllib.request
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # as the command does, before gradio is imported

from caaseg import app
from tests.small_models import scenes_model

FILE_DATA = {"_type": "gradio.FileData"}


def status(address: str, host: str) -> int:
    """Return the status code of the answer to a request with a Host header; without a host, with the usual one."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers={"Host": host} if host else {})) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def upload_succeeds(address: str, path: str) -> bool:
    """Send the event of an upload; return whether the app accepts the path of the file."""
    config = json.load(urllib.request.urlopen(f"{address}config"))
    (upload,) = [k for k, event in enumerate(config["dependencies"]) if event["targets"][0][1] == "upload"]
    body = {"data": [{"path": path, "meta": FILE_DATA}, 60], "fn_index": upload, "session_hash": "s"}
    request = urllib.request.Request(
        f"{address}gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).read()
    with urllib.request.urlopen(f"{address}gradio_api/queue/data?session_hash=s") as stream:
        for line in stream:
            if line.startswith(b"data: ") and (event := json.loads(line[6:]))["msg"] == "process_completed":
                return bool(event["success"])
    raise AssertionError("the event did not end")


def main() -> None:
    looked_up: set[str] = set()
    look_up = socket.getaddrinfo

    def hook(host: Any, *arguments: Any, **options: Any) -> Any:
        looked_up.add(str(host))
        return look_up("127.0.0.1", *arguments, **options)

    def send_requests(address: str) -> None:
        statuses = {host: status(address, host) for host in ("", "localhost", "evil.example")}
        statuses["monitoring"] = status(f"{address}monitoring", "")
        upload_succeeded = upload_succeeds(address, "http://outside.example/a.png")
        print(json.dumps({"statuses": statuses, "upload_succeeded": upload_succeeded, "looked_up": sorted(looked_up)}))
        raise KeyboardInterrupt  # as Ctrl-C

    socket.getaddrinfo = hook
    app.serve([("mine", scenes_model())], host="127.0.0.1", port=None, on_start=send_requests)


if __name__ == "__main__":
    main()
