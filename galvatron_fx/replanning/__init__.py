"""A compiled model goes on on other ranks, between two steps: :func:`galvatron_fx.replan`."""
