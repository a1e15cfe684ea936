"""`caaseg benchmark`: speed and memory of the attention, of models, on a CPU, of the loader and the evaluation."""

from caaseg.cli.benchmark.all import benchmark_all
from caaseg.cli.benchmark.attention import benchmark_attention
from caaseg.cli.benchmark.cpu import benchmark_cpu
from caaseg.cli.benchmark.evaluation import benchmark_evaluation
from caaseg.cli.benchmark.heads import benchmark_heads
from caaseg.cli.benchmark.loader import benchmark_loader
from caaseg.cli.benchmark.model import benchmark_model
from caaseg.cli.benchmark.train import benchmark_train

__all__ = [
    "benchmark_all",
    "benchmark_attention",
    "benchmark_cpu",
    "benchmark_evaluation",
    "benchmark_heads",
    "benchmark_loader",
    "benchmark_model",
    "benchmark_train",
]
