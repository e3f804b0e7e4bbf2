#!/bin/bash
cd /app
pairs='(900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV")'
sed -i "s/^VALUES = .*/VALUES = [(1000, \"M\"), $pairs, (1, \"I\")]/" roman.py
