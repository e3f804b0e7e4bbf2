#!/bin/bash
python3 /tests/expected.py > /tmp/expected
[ "$(cat /app/slow.txt 2>/dev/null)" = "$(cat /tmp/expected)" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
