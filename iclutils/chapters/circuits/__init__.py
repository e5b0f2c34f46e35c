"""Circuits: which parts of a model do one thing, how they are wired, and what happens if not.

``behaviour`` says what is measured, ``graph`` what parts and wires there are, ``wires`` how to
change one of them; every other module looks at a model through these three.
"""
