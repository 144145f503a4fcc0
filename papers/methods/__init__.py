"""The papers' methods, one module per family; importing a module registers its methods."""

# Importing `decoding.methods` also imports the modules of this package, so this line loads both.
from ...decoding import methods as methods
