"""The verbs on real devices. A backend's module is imported when its name is asked for, not before."""

from weightsync.backends.registry import Registry

__all__ = ["Registry"]
