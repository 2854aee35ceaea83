"""Compare a plan with eager training on one device: on simulated ranks, or on real ones."""
