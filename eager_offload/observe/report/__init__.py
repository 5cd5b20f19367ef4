"""A trace as one self-contained page: what ran when, what memory that took, what saved it, and what stayed."""
