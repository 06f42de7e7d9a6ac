"""`KVCache`: keys and values of past tokens, in pages."""
