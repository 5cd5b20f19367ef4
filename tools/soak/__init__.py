"""Trains for minutes on end with everything that may go wrong, and looks whether anything has grown."""
