"""Other engines that kvweave's fusion runs inside."""
