"""Attention as a step of learning: on a least-squares loss, and on a contrastive one."""
