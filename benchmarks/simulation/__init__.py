"""A large model's training step on the simulated runtime: the device, the model, and the best that could be done."""
