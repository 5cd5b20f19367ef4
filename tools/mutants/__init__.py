"""Which test notices what is taken out; see ``__main__.py``."""
