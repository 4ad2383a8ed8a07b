"""The shipped test kit."""

import weightsync.testing.rewriting  # noqa: F401  (before any other module of the kit is imported)
