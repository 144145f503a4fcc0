"""Who proposes the next candidate: ask/tell strategies by name."""
