"""Benchmark suites, and what they share: how to measure and what a result of record carries."""
