"""Measuring quality: questions, trials against full prefill, tables, and the gate.

`experiment.py` runs a calibration from questions to tables, `gate.py` chooses from a table, and
`profiles.py` keeps tables and critical layers per model.
"""
