"""Which algorithm in-context regression is, after {cite}`akyurek2023`.

``algorithms`` are textbook algorithms, ``distances`` what separates a transformer's predictions
from theirs, ``probes`` what its layers hold, ``construction`` a GPT-2 with weights set by hand that
runs an algorithm, ``text`` the task written for language models."""
