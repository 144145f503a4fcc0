"""Draft, verify, commit: one loop for every method."""
