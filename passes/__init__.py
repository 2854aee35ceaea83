"""The graph passes of Galvatron-FX: one pass a file, named for what it does; the searches are in ``search``."""
