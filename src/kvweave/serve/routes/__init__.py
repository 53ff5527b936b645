"""What each address answers with."""
