"""Mistakes that any function can have, whatever it is meant to compute."""

from __future__ import annotations

from clearhead.doctor.mistake import Mistake

TROUBLES = {
    one.name: one
    for one in (
        Mistake(
            "not-written-yet",
            "the function is not written yet",
            "it raises NotImplementedError, as the starting file has it",
            "replace the line that raises by your own",
        ),
        Mistake(
            "raises",
            "the function raises an error",
            "there is no answer to look at",
            "call it yourself on the example below, and print the shapes on the way",
        ),
        Mistake(
            "other-parameters",
            "the function takes other parameters",
            "it is called with what the exercise names, in that order",
            "give it the parameters of the starting file",
        ),
        Mistake(
            "returns-nothing",
            "the function returns nothing",
            "without a return Python hands back None",
            "end with a return",
        ),
        Mistake(
            "prints-instead",
            "the result is printed, and not returned",
            "print shows a value to a reader; who calls the function gets None",
            "return it in place of printing it",
        ),
        Mistake(
            "wrong-type",
            "what comes back is no array of numbers",
            "an array, or nested lists of numbers, can be compared",
            "return the array itself",
        ),
        Mistake(
            "wrong-count",
            "another number of things comes back",
            "what is returned has to be what the exercise names, in that order",
            "return them as one tuple",
        ),
        Mistake(
            "wrong-shape",
            "what comes back has another shape",
            "the numbers may be right and stand in the wrong places",
            "write the shape of every array on the way beside its line",
        ),
        Mistake(
            "gives-nan",
            "what comes back holds NaN or infinity",
            "∞ − ∞, 0 / 0 and 0 · ∞ are NaN, and one of them spoils all that follows",
            "look for an exponential that overflows, a sum that is 0, or a subtraction of infinities",
        ),
        Mistake(
            "precision-lost",
            "the result is nearly right, and not to the digits that the inputs have",
            "somewhere numbers pass through a shorter type, or a small number is added that should not be",
            "compute in the inputs' own dtype, and add no constants",
        ),
        Mistake(
            "complex-numbers",
            "what comes back is complex",
            "an eigenvector of a matrix that is not symmetric is computed in complex numbers",
            "the imaginary parts are 0 here: take the real ones, or find the answer without eigenvectors",
        ),
        Mistake(
            "took-too-long",
            "the function had not answered in time",
            "a loop may never end, or take far more steps than are needed",
            "try it on the smallest sizes by yourself, and count the steps",
        ),
        Mistake(
            "ended-python",
            "the solution ended Python before there was an answer",
            "nothing could be compared",
            "leave out what ends the program, such as os._exit",
        ),
        Mistake(
            "matrix-built",
            "the whole matrix of scores is built",
            "its memory grows with the square of the length: at 100,000 positions it takes 40 GB",
            "keep no array of queries × keys: only a few keys at a time, and what is needed of those before",
        ),
        Mistake(
            "unknown",
            "the result is wrong, and it is no mistake that has a name here",
            "it matches neither the formula nor any of the broken ones",
            "compute the small example below by hand, one step at a time",
        ),
    )
}
