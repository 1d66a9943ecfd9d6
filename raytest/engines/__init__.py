"""Engines: what runs requests inside a worker. ``base`` has the protocol, the others keep it."""
