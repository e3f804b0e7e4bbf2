#!/bin/bash
[ "$(cat /app/sum.txt 2>/dev/null)" = 18108 ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
