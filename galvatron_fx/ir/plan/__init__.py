"""What a plan is: strategies, stages, schedules, precision, and what the search tells of it. Read without torch."""
