"""Homework of a class: derive the students' copies, grade what they hand in, join what they got.

The solved masters are one folder up, their tables in ``answers/``; what judges an answer is
``iclutils.checks``. ``assignments`` derives the copies, ``submissions`` grades, each submission in
bounds (``confine``, ``guard``, ``inside``), ``reports`` writes tables, feedback and the gradebook.
"""
