"""The decision for one request: which order, which chunks exact, fused or computed, at what price.

CPU only and without side effects: the planner reads `peek`s and measured profiles and touches no
bytes. No torch here, so that a gateway without a GPU can plan. Start with `planner.py`.
"""
