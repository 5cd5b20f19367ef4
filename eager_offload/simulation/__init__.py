"""A virtual device, the happens-before checker and its log, for proof and for planning; training imports none of it."""
