"""Search for the layer set that decodes fastest, while a stream of prompts is served."""
