"""Values, errors and settings shared by all other packages; imports none of them, and never torch."""
