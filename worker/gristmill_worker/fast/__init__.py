"""Our own decoder for Llama-shaped models: flat token streams, fused projections, backward by hand."""
