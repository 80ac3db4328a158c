"""Random bad inputs, given to the real command as a user, a CI server or an accident would give them.

``cases`` composes them, ``judge`` runs one and says what is wrong with the answer, and
``python -m tests.bad_inputs --seed N --count 500`` runs many.
"""
