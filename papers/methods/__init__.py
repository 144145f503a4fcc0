"""The papers' methods, one module per family; importing a module registers its methods."""

# `decoding.methods` imports the modules of this package, so this line registers the methods of both.
from ...decoding import methods as methods
