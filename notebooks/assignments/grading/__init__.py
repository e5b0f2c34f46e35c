"""Homework of a class: derive the students' copies, grade what they hand in, join what they got.

The solved masters are one folder up; their tables, and ``checks``, which judges an answer, are in
``answers/``.
"""
