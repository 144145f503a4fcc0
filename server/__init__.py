"""The HTTP API: layer-set look-ups, jobs, events, health and metrics; starts without torch."""
