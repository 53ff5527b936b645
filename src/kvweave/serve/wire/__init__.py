"""The JSON that goes in and out, as models."""
