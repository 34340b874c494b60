"""What commands compute beyond a run: ratios of layers, plans of pipelines, who is pruned."""
