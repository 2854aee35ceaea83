"""The command ``galvatron-fx``: one module a subcommand, and what they share; torch is imported when work begins."""
