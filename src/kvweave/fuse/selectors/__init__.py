"""Who picks the rows to recompute: one file per published idea, all behind one contract."""
