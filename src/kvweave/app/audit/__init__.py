"""The shadow audit: a share of fused answers is computed exactly in idle time, and the gate moves
by what that finds.

answer ─► Auditor ─► exact request in the background ─► AuditLog ─► AuditedGate ─► plans
"""
