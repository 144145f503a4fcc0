"""Load a target model by name, run passes over rows, hold its keys and values, measure its costs."""
