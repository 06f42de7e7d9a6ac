"""The NumPy backend: every function in its plainest form, written to be read, and the last fallback."""
