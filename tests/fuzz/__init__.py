"""A fuzzer of all that takes what a user writes: `./dev fuzz`.

An input is a Python literal, so that a reproducer is a line of text. A target draws inputs with
Hypothesis, or with atheris, and says of each what came of it: a right answer or a documented error;
anything else is a failure. Inputs run in processes of their own under a watchdog, so that an abort
or a hang has its input's name on it.
"""
