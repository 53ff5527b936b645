"""Documents on their way in: forms, spools, and the blocking work behind them."""
