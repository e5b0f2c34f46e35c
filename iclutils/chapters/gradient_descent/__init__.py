"""Attention as a step of learning: on a least-squares loss, and on a contrastive one.

Linear attention and least squares:

- ``descent``: gradient descent in context and GD++, explicit;
- ``one_step``: the best rate and the best matrix of a single step, in closed form;
- ``tuning``: the best rates of several steps, found numerically;
- ``construction``: the same steps as weights of linear self-attention;
- ``alignment``: how near a trained solver is to an algorithm, by its answers and its weights;
- ``copying``: whether a first layer brings the x and y of a pair together.

Softmax attention and a contrastive loss:

- ``features``: feature maps whose inner product is the kernel of softmax attention;
- ``approximation``: how far attention by such features is from the real one;
- ``linearised``: when softmax attention is close to linear attention;
- ``contrastive``: the dual model of softmax attention, and the loss it takes a step on;
- ``explicit``: the same step by autograd, without any closed form;
- ``note``: the formulas of the seed note as written, to measure what their slips cost;
- ``variants``: changes of that loss, as changes of attention;
- ``blocks``: a whole layer, feed-forward part included, as a dual model.

The heads of models that read tokens, as dual models:

- ``activations``: their queries, keys and values; ``gram``: finite features, exact for these;
- ``heads``: start and step of every head at a query;
- ``attribution``: what the steps add to a logit directly;
- ``removal``: what is left of the answer without them.
"""
