"""The verbs on real devices."""
