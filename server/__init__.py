"""The HTTP API: layer-set lookups, jobs, events, health and metrics; starts without torch."""
