"""Documents that come in: the form or text, the spool where it waits, the ingest of it."""
