"""What a command or a job runs: generate, tune, compare, train, and what methods need for it."""
