"""What one chapter measures, a folder for each subject. Nothing here draws.

01 ``induction``, 02 ``label_words``, 03 ``regression`` and ``constructions``, 04 and 05
``gradient_descent``, 06 ``circuits``, 07 ``lenses``.
"""
