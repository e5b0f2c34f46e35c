"""Which algorithm in-context regression is, after {cite}`akyurek2023`.

``algorithms`` are textbook algorithms, ``distances`` what separates a transformer's predictions
from theirs, ``probes`` what its layers hold, ``text`` the same task written for language models.
``layout``, ``primitives`` and ``programs`` are its section 3: the primitives ``mov``, ``mul``,
``div`` and ``aff`` as layers of GPT-2 which, composed, take a gradient step (theorem 1) or update
a ridge solution (theorem 2); ``reports`` runs them.
"""
