"""Tasks: samplers and prompt builders. They return data (tokens, positions), never measurements."""
