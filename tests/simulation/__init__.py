"""A simulated device with real bytes and a virtual clock, the happens-before checker and its log."""
