#!/bin/bash
# The program runs in a process of its own: it can end itself, and not its tests.
reward=1
while read -r number numeral; do
  [ "$(python3 /app/roman.py "$number" 2>/dev/null)" = "$numeral" ] || reward=0
done < /tests/numerals.txt
echo $reward > /logs/verifier/reward.txt
