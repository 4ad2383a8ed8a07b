"""The verbs on a modelled cluster."""
