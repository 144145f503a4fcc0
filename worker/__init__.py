"""Run a tuning job and write what it reports to the store."""
