"""Blocking work on threads of its own, for the event loop: answers, and everything else."""
