"""Fuzz jobs: foreign bytes into the places that read them. `make fuzz MINUTES=60` runs them long."""
