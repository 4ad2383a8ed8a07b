"""Wire forms of a sparse delta: how positions and values become bytes, what it costs, and which to take."""
