"""What a user holds in hand: `Weave`, and everything it wires together."""
