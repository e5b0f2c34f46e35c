"""Attention as a kernel and as a step on a contrastive loss: the dual model of a head."""
