"""The client of a swiftopt server: jobs and layer sets over HTTP."""

from .http import Client

__all__ = ["Client"]
