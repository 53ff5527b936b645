"""For programs that use a running server: a client of our own, and parts for other frameworks."""
