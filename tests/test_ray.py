"""The example with Ray Data in the documentation writes the same files as one process."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from caaseg.cli import main
from tests.small_models import scene, varied_model

PAGE = Path(__file__).parents[1] / "docs" / "many-devices.md"


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_ray_example_writes_the_files_of_one_process(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(# predict_with_ray\.py\n.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "predict_with_ray.py").write_text(block)
    varied_model(3).save_pretrained(tmp_path / "model")
    photos = tmp_path / "photos"
    for k in range(40):
        path = photos / str(k % 3) / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scene(k % 8).permute(1, 2, 0).numpy()).save(path)
    (photos / "bad.png").write_text("not an image")
    arguments = [str(tmp_path / "model"), str(photos)]
    assert main(["predict", *arguments, "--out", str(tmp_path / "whole"), "--device", "cpu"]) == 2
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "predict_with_ray.py", *arguments, str(tmp_path / "ray")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"{photos / 'bad.png'}: not an image" in ended.stderr
    assert contents(tmp_path / "ray") == contents(tmp_path / "whole")
    assert len(list((tmp_path / "ray" / "labels").rglob("*.png"))) == 40
