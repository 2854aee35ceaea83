"""Graph passes and searches, a room a step of the way: analysis, sharding, frontend, lowering, simulation, search."""
