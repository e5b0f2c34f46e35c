"""Attention as a step of learning: on a least-squares loss, and on a contrastive one.

- ``descent``: gradient descent in context and GD++; the best single step and the best settings;
- ``construction``: the same steps as weights of linear self-attention; copying;
- ``alignment``: how near a trained network is to an algorithm, by its answers and its weights;
- ``features``: feature maps whose inner product is the kernel of softmax attention;
- ``dual``: softmax attention as one gradient step of a linear model on a contrastive loss;
- ``heads``: the heads of models that read tokens as such models; direct logit attribution;
- ``ablation``: what is left of a model's answers without these steps.
"""
