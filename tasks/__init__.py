"""The work behind commands and jobs: generate, tune, compare, train, and preparing what methods need."""
