"""The command line: one file per command group; only this package prints."""
