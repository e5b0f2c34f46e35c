"""Which algorithm in-context regression is: textbook algorithms, distances to them, probes.

Source: {cite}`akyurek2023`.
"""
