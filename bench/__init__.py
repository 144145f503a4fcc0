"""Benchmarks: interleaved runs that print a table, then one JSON line."""
