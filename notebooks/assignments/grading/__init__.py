"""Homework of a class: derive the students' copies, grade what they hand in, join the points."""
