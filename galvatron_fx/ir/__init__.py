"""The vocabulary of Galvatron-FX: strategies, plans, clusters, node facts, and what passes are made of."""
