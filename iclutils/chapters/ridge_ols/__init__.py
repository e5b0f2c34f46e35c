"""Which algorithm in-context regression is, after {cite}`akyurek2023`.

``algorithms`` are textbook algorithms, ``distances`` what separates a transformer's predictions
from theirs, ``probes`` what its layers hold, ``text`` the task written for language models. Section
3 is ``layout``, ``primitives`` and ``programs`` (a GPT-2 with weights set by hand that runs an
algorithm), measured by ``reports``."""
