"""Benchmarks by name: `catalogue` is the one table of them, `benchmark_source` reads and scores whichever it names."""
