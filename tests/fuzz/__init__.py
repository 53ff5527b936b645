"""Fuzz jobs: foreign bytes into what reads them. `make fuzz MINUTES=60` runs them long."""
