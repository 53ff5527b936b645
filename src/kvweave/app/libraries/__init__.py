"""Many knowledge bases, by name and tenant, for the server."""
