"""Which of the best plans is fastest on the real ranks: plans go in, with a batch; out comes the one to train with."""
