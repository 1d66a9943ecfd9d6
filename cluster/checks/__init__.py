"""Offline checks of what ``cluster/`` ships: ``make check-cluster``."""
