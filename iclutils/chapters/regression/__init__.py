"""What a learner of regressions computes: textbook algorithms, distances to them, probes."""
