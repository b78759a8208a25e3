"""Benchmarks by name: `catalogue` is their table, `benchmark_source` reads and scores any of them."""
