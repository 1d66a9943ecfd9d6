"""Verdicts for where people look: a terminal, a browser, a pull request, a pager."""
