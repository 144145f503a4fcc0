"""Other engines: running them in separate environments, and exporting plans to their file formats."""
