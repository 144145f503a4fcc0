"""Training on a frozen model: heads at intermediate layers, and a probe that predicts acceptance."""
