"""Attention as a step of gradient descent on a least-squares loss ({cite}`vonoswald2023`)."""
