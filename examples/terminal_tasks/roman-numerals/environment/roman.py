"""Print a number as a Roman numeral."""

import sys

VALUES = [(1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I")]


def roman(number):
    text = ""
    for value, letters in VALUES:
        text += letters * (number // value)
        number %= value
    return text


print(roman(int(sys.argv[1])))
