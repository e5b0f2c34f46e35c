"""Label words as anchors: the measurements of Wang et al. 2023 (arXiv 2305.14160).

First the label words of the demonstrations collect what their demonstrations say, then the
target reads it from them. ``saliency`` sees both flows, ``isolation`` cuts the first, and
``extraction`` weighs the second; ``reweighting``, ``compression`` and ``confusion`` use them.
"""
