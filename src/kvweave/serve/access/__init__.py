"""Who and what is let in: keys, origins, limits, connections; and how all else is refused."""
