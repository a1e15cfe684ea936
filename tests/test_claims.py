"""A name is one process's at a time, and nobody's when that process is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from caaseg.claims import Claims

HOLD = """
import sys, time
from pathlib import Path
from caaseg.claims import Claims
with Claims(Path(sys.argv[1])) as claims, claims.claimed("a", wait=False) as ours:
    print(ours, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such locks")
def test_a_name_that_another_process_holds_is_refused_until_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "out" / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with Claims(path) as claims:
            with claims.claimed("a", wait=False) as ours:
                assert not ours
            with claims.claimed("b", wait=False) as ours:
                assert ours
            other.kill()
            with claims.claimed("a", wait=True) as ours:
                assert ours
    assert path.read_bytes() == b""
