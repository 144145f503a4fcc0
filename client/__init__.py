"""The clients: jobs and layer sets of a swiftopt server, and chats with any OpenAI-compatible one."""

from .http import Client

__all__ = ["Client"]
