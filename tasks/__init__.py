"""The work of commands and jobs: generate, tune, compare, train, and preparing what methods need."""
