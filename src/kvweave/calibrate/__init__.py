"""Measuring quality: questions, trials against full prefill, tables, and the gate."""
