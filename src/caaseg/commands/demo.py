"""`caaseg demo`: see it work, with no files and no network."""

from pathlib import Path

from caaseg.commands.benchmark import benchmark_attention


def demo(out: Path = Path("caaseg-demo")) -> int:
    """See what the factorisation does: a small comparison with the paper's own way, its table and its figure.

    Args:
        out: folder for the figure and the numbers.
    """
    return benchmark_attention(
        sizes="1x17x17,1x33x33",
        dtypes="float32",
        groups="1,2,4,8,16,33",
        channels=128,
        device="cpu",
        seconds=0.2,
        json=str(out / "attention.json"),
        figure=out / "attention.png",
    )
