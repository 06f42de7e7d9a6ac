"""The public functions, each a list of stages; and the prepared calls that they share."""
