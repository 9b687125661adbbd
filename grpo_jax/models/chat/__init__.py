"""Tokenizers and chat templates, which may be a stranger's: opened and rendered within bounds."""
