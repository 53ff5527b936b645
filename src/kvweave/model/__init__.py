"""From a model folder to a decoder: spec, weights, one decoder for the RoPE family."""
