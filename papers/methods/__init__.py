"""The papers' methods, a file per family, which register themselves beside those of `decoding.methods`."""

from ...decoding import methods as methods  # It imports the files of this package, whichever of the two is asked for.
