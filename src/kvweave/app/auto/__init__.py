"""`reuse="auto"`: the planner wired to a model, a store and this machine."""
