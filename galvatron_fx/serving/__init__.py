"""Plans for serving: traces of requests simulated on costs of forward-only programs."""
