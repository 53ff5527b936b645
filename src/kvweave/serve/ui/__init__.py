"""The web page at `/`: its files lie in `static/` and are sent as they are."""
