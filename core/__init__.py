"""Values, errors and settings that every other part speaks in; imports nothing of ours, and never torch."""
