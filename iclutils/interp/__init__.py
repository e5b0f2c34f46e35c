"""What several chapters share: hooks, head scores, weights, path patching, edges, statistics."""
