"""Benchmark suites against named rivals, run from a checkout: ``python -m benchmarks``."""
