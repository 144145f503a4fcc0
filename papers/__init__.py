"""Methods of papers that are here to be repeated: heads and probes, their training, presets, ablations and tables."""
