"""What one chapter measures, a folder for each subject. Nothing here draws.

Each is named as its notebook, 01 ``gpt2_induction`` to 07 ``every_lens``; ``iclutils`` lists them.
"""
