"""Helpers that several test layers share."""
