"""Tokenizers and chat templates, possibly untrusted: opened and rendered within limits."""
