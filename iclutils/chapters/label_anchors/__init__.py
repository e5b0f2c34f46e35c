"""Label words as anchors: the measurements of Wang et al. 2023 (arXiv 2305.14160).

Label words collect what their demonstrations say, and the target reads it from them: ``saliency``
sees both flows, ``isolation`` cuts the first, ``extraction`` weighs the second, and
``reweighting``, ``compression`` and ``confusion`` use them."""
