"""raytest: a determinism tester for vLLM on Ray clusters."""

__version__ = "0.1.0"
