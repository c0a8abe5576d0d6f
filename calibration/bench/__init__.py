"""Benchmarks by suite, run by `calibration.bench_main`; `registry.SUITES` names them."""
