"""What is kept of past tokens: by `KVCache` keys and values in pages, by `RecurrentState` a state."""
