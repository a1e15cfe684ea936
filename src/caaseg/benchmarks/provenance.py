"""Provenance of a measurement: command, commit, hardware and versions."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import caaseg


def provenance(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    """Return command, commit, hardware and versions.

    Args:
        device: the device that was measured.
        arguments: command-line arguments after `caaseg`.
    """
    return {
        "command": shlex.join(["caaseg", *arguments]),
        "commit": _commit(),
        "hardware": {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "caaseg": caaseg.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def _commit() -> str | None:
    """Return the commit of the checkout, with "+changes" if tracked files differ, or None outside a checkout."""
    if commit := os.environ.get("CAASEG_COMMIT"):  # for a copy of the tree without its history
        return commit

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(caaseg.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        git("ls-files", "--error-unmatch", caaseg.__file__)  # fails for a copy installed inside another checkout
        return git("rev-parse", "HEAD").strip() + ("+changes" if git("diff", "HEAD", "--stat") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
