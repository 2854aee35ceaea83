"""Every private torch entry point that Galvatron-FX uses, so that a torch upgrade touches one folder."""
