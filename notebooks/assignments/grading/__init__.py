"""Homework of a class: derive the students' copies, grade what they hand in, join what they got.

The solved masters are one folder up; their tables, and ``checks``, which judges an answer, are in
``answers/``. ``assignments`` derives the copies, ``submissions`` grades, each in a sandbox
(``confine``, ``worker``), ``reports`` writes tables, feedback and the gradebook.
"""
