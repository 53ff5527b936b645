"""Parts of bench/report.py: what of each result is shown, and the pages made of it."""
