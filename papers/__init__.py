"""Reproduction of papers' methods: heads and probes, their training, presets, ablations and tables."""
