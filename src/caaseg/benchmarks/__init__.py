"""Speed and memory benchmarks."""
