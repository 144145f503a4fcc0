"""Other engines: run here in environments of their own, and given plans as what they load."""
