"""What a graph is: the record of every node, placements, collectives, symbols, and the verifier that checks it all."""
