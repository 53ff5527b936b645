"""What is served: each route translates its request into calls of `kvweave.app`, and back."""
