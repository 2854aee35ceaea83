"""What a person reads about a plan: pictures and traces."""
